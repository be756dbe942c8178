# SPDX-License-Identifier: Apache-2.0
"""`penstock instances`: list and remove the instances stored in the coordination store."""

import sys
from typing import Annotated

import typer

from penstock.cli.shared.fleet_store import opened_store
from penstock.cli.shared.options import AsJson, Coordination, MemberConfig
from penstock.cli.shared.rendering import write_json

HELP = "List and remove the instances that are kept in the coordination store."

_Name = Annotated[str, typer.Argument(metavar="INSTANCE", help="The instance.")]


def list_(config: MemberConfig = None, coordination: Coordination = None, as_json: AsJson = False) -> None:
    """List the instances that were applied or removed. Instances defined only in settings files are not
    listed.
    """
    from penstock.fleet.wanted import read_wanted

    with opened_store(config, coordination) as store:
        instances = sorted(read_wanted(store).values(), key=lambda instance: instance.name)
    if as_json:
        write_json(
            sys.stdout,
            (
                {"instance": wanted.name, "version": wanted.version, "removed": wanted.text is None}
                for wanted in instances
            ),
        )
        return
    for wanted in instances:
        typer.echo(f"{wanted.name:<24}version {wanted.version}{', removed' if wanted.text is None else ''}")


def remove(name: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Stop capturing an instance, even one that is defined in a settings file. Its log and its subscriptions
    stay.
    """
    from penstock.errors import OptionInvalid, SourceMissing
    from penstock.fleet.wanted import WantedInstance, known_instances, read_wanted, want_instance
    from penstock.settings.daemon import load_settings
    from penstock.settings.file import yaml_documents

    in_file = {} if config is None else load_settings(config, with_secrets=False).instances
    with opened_store(config, coordination) as store:
        known = in_file.keys() | known_instances(store)
        if name not in known:
            raise SourceMissing(
                f"there is no instance {name!r}",
                hint=f"Known here: {', '.join(sorted(known)) or 'none'}; --config names those of its file",
            )
        members = {merge: instance.merge for merge, instance in in_file.items()}
        for wanted in read_wanted(store).values():
            (section,) = ({},) if wanted.text is None else yaml_documents(wanted.text)
            members[wanted.name] = section.get("merge", ())
        for merge in (merge for merge, names in members.items() if name in names):
            raise OptionInvalid(
                f"{name} is a member of the merge {merge}",
                hint=f"Run first: penstock instances remove {merge}",
            )
        want_instance(store, WantedInstance(name, None))
    typer.echo(f"{name} is removed; its log and its subscriptions stay")


def forget(name: _Name, config: MemberConfig = None, coordination: Coordination = None) -> None:
    """Apply the settings files to an instance again."""
    from penstock.fleet.wanted import forget_instance

    with opened_store(config, coordination) as store:
        forget_instance(store, name)
    typer.echo(f"the settings files decide about {name} again")


VERBS = {"list": list_, "remove": remove, "forget": forget}
