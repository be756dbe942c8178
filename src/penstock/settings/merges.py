# SPDX-License-Identifier: Apache-2.0
"""Determines which instances take part in merges, and checks that they can be merged."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.settings.daemon import InstanceSettings, Settings


def merged_instances(instances: "Mapping[str, InstanceSettings]") -> set[str]:
    """Return the merges and their members, which are captured in one process."""
    merges = {name: instance.merge for name, instance in instances.items() if instance.merge}
    return set(merges).union(*merges.values())


def check_merges(settings: "Settings") -> None:
    """Raise ValueError for a merge whose members cannot be merged."""
    for name, instance in settings.instances.items():
        for member in instance.merge:
            member_settings = settings.instances.get(member)
            if member_settings is None:
                raise ValueError(f"merge: {name} names {member}, and there is no such instance")
            if member_settings.merge or member_settings.is_tidb or member_settings.is_ticdc:
                raise ValueError(f"merge: {name} names {member}, which is no MySQL or MariaDB server")
        if instance.merge and settings.fleet is not None:
            raise ValueError(f"fleet: {name} is a merge, which a daemon without fleet captures")
    for name in sorted(merged_instances(settings.instances)):
        if settings.log_of(name).mode == "memory":
            raise ValueError(f"log.mode: {name} takes part in a merge, which needs a log on disk")
