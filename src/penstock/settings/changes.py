# SPDX-License-Identifier: Apache-2.0
"""Compares the settings of a running daemon with new settings."""

from dataclasses import dataclass

from penstock.errors import OptionInvalid
from penstock.settings.daemon import Settings
from penstock.settings.merges import merged_instances


@dataclass(frozen=True)
class InstanceChange:
    """The names of instances whose settings differ. `with_other_log` contains the changed instances whose log
    changed.
    """

    added: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    with_other_log: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.changed or self.removed)

    @classmethod
    def between(cls, before: Settings, after: Settings) -> "InstanceChange":
        """Return the changes that a running daemon has to make. Raises OptionInvalid for a change that needs
        a restart.
        """
        sections = [
            name
            for name in type(before).model_fields
            if name != "instances" and getattr(before, name) != getattr(after, name)
        ]
        if sections:
            raise OptionInvalid(
                f"only instances are changed while the daemon runs, and other sections differ too:"
                f" {', '.join(sections)}",
                hint="Restart the daemon to change them",
            )
        common = before.instances.keys() & after.instances.keys()
        merges = {name for name, instance in after.instances.items() if instance.merge}
        joined_or_left = merged_instances(before.instances) ^ merged_instances(after.instances)
        changed = [
            name
            for name in common
            if before.instances[name] != after.instances[name]
            # A member of a merge is captured in the daemon's own process, so joining or leaving a merge may
            # move its capture.
            or (name in joined_or_left and before.has_process(name) != after.has_process(name))
        ]
        change = cls(
            # Members start before the merges that depend on them.
            tuple(sorted(after.instances.keys() - common, key=lambda name: (name in merges, name))),
            tuple(sorted(changed, key=lambda name: (name in merges, name))),
            tuple(sorted(before.instances.keys() - common)),
            tuple(name for name in sorted(changed) if before.log_of(name) != after.log_of(name)),
        )
        if change:
            change._refuse(before, after)
        return change

    def _refuse(self, before: Settings, after: Settings) -> None:
        hint = "Restart the daemon with the new settings"
        if after.listeners != "single":
            raise OptionInvalid("listener processes keep the instances that they began with", hint=hint)
        if isinstance(after.processes, int):
            raise OptionInvalid(
                "processes: a number shares the instances out once, at the start of the daemon",
                hint=hint,
            )
        for name, instance in after.instances.items():
            if instance.merge and name not in (*self.added, *self.changed):
                for member in (member for member in instance.merge if member in self.changed):
                    raise OptionInvalid(
                        f"{member} is a member of the merge {name}, which goes on without interruption",
                        hint=f"Remove {name} first, and add it again afterwards; or restart the daemon",
                    )
        for name in (*self.added, *self.changed, *self.removed):
            instances = [settings.instances.get(name) for settings in (before, after)]
            if any(
                instance is not None and (instance.is_tidb or instance.is_ticdc) for instance in instances
            ):
                raise OptionInvalid(f"{name} is a TiDB cluster, which cannot be changed", hint=hint)
