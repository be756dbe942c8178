# SPDX-License-Identifier: Apache-2.0
"""The documents of `penstock export` and `penstock apply`: jobs, instances and subscriptions as text."""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.cli.shared.chosen_subscription import full_name
from penstock.coordinate.store import CoordinationStore
from penstock.coordinate.subscription_record import Selection, Subscription, Subscriptions
from penstock.errors import OptionInvalid, SourceMissing
from penstock.fleet.jobs import JobSpec, apply_job, check_job_name, read_job
from penstock.fleet.records import JOBS, names_below
from penstock.fleet.wanted import WantedInstance, read_wanted, want_instance
from penstock.model import TablePatterns
from penstock.pipeline.settings import place_of_state
from penstock.predicate import Predicate
from penstock.settings.documents import (
    InstanceDocument,
    JobDocument,
    SubscriptionDocument,
    exported_instance,
)
from penstock.settings.exported import ExportedText, without_secrets
from penstock.settings.file import REFERENCE, read_yaml, yaml_documents, yaml_text
from penstock.settings.values import Section
from penstock.source.asked_changes import change_types, sent_columns


@dataclass(frozen=True)
class ExportedDocument:
    """A document as plain values, and remarks about it. `values` is None if there is nothing to apply."""

    values: dict[str, Any] | None
    remarks: tuple[str, ...] = ()


def export_documents(
    store: CoordinationStore, labels: Mapping[str, str], file_sections: Mapping[str, Mapping[str, Any]]
) -> Iterator[ExportedDocument]:
    """Yield the instances, then the jobs, then the subscriptions that have all of these labels.

    `file_sections` are a settings file's instances as written; the store's instances replace them. Raises
    OptionInvalid, SchemaInvalid, CoordinationLost.
    """
    from_file = {name: WantedInstance(name, yaml_text(section)) for name, section in file_sections.items()}
    for _, instance in sorted({**from_file, **read_wanted(store)}.items()):
        if instance.text is not None:
            exported = _export_instance(instance, instance.text)
            if labels.items() <= (exported.values or {})["settings"].get("labels", {}).items():
                yield exported
    for name in names_below(store, JOBS):
        job = read_job(store, name)
        if labels.items() <= job.labels.items():
            yield _export_job(job)
    for subscription in Subscriptions(store).list():
        if labels.items() <= subscription.labels.items():
            yield _export_subscription(store, subscription)


def apply_documents(
    store: CoordinationStore, documents: Sequence[Section], values: Mapping[str, str]
) -> Iterator[str]:
    """Store what the documents describe, with `values` for their variables and labels; yield a line for each
    document.

    If any document cannot be stored, none is stored. Raises OptionInvalid, VersionConflict, CoordinationLost.
    """
    jobs = [_job_of(document, values) for document in documents if isinstance(document, JobDocument)]
    subscriptions = [
        _subscription_of(document, values)
        for document in documents
        if isinstance(document, SubscriptionDocument)
    ]
    instances = [
        _instance_of(document, values) for document in documents if isinstance(document, InstanceDocument)
    ]
    check_values(
        values,
        {
            *(name for document in instances for name in (*document.labels, *document.values)),
            *(name for job in jobs for name in (*job.labels, *job.values)),
            *(name for subscription in subscriptions for name in subscription.labels),
        },
    )
    registry = Subscriptions(store)
    if values:
        before_all = {} if not instances else read_wanted(store)
        for document in instances:
            _refuse_another_unit(
                f"instance {document.instance}",
                _labels_of_instance(before_all.get(document.instance)),
                document.labels,
            )
        for job in jobs:
            _refuse_another_unit(f"job {job.name}", _labels_of_job(store, job.name), job.labels)
        for wanted in subscriptions:
            existing = registry.get(wanted.instance, wanted.name)
            before = None if existing is None else existing.labels
            _refuse_another_unit(f"subscription {full_name(wanted)}", before, wanted.labels)
    for document in instances:
        wanted_instance = WantedInstance(document.instance, document.text(), document.values)
        stored, changed = want_instance(store, wanted_instance)
        yield f"{stored.name}: version {stored.version}{'' if changed else ', unchanged'}"
    for job in jobs:
        yield apply_line(store, job)
    for wanted in subscriptions:
        yield _apply_subscription(registry, wanted)


def apply_line(store: CoordinationStore, job: JobSpec) -> str:
    """Store a job, and return a line with the outcome. Raises VersionConflict, CoordinationLost."""
    applied, changed = apply_job(store, job)
    return f"{applied.name}: version {applied.version}{'' if changed else ', unchanged'}"


def check_values(values: Mapping[str, str], known: Iterable[str]) -> None:
    """Raise OptionInvalid for a `--set` value whose name no document refers to."""
    unused = sorted(values.keys() - set(known))
    if unused:
        name = unused[0]
        raise OptionInvalid(
            f"--set {name}: nothing refers to ${{{name}}}, and no label has this name",
            hint=f"Write ${{{name}}} where copies differ, in a pipeline file also in its name",
        )


def values_in(text: str, values: Mapping[str, str]) -> dict[str, str]:
    """Return the values that a text refers to."""
    names = {match.group(2) for match in REFERENCE.finditer(text)}
    return {name: value for name, value in values.items() if name in names}


def job_name(path: Path, text: str, values: Mapping[str, str]) -> str:
    """Return the pipeline's name. Raises OptionInvalid if the location of its state depends on the host."""
    document = read_yaml(path, {**os.environ, **values}, text=text)
    state = place_of_state(path, document)
    written = document.value.get("state") if isinstance(document.value, dict) else None
    if written != state.state:
        raise OptionInvalid(
            f"{path}: state must name a store that every worker reaches, by its whole path",
            hint="Write state: zookeeper://host:2181/path, or on one host sqlite:///absolute/path.db",
        )
    check_job_name(state.name)
    return state.name


# --- Instances ------------------------------------------------------------------------------


def _export_instance(instance: WantedInstance, text: str) -> ExportedDocument:
    document, exported = exported_instance(instance.name, text, instance.values)
    return ExportedDocument(document, _remarks(f"instance {instance.name}", instance.values, exported))


def _instance_of(document: InstanceDocument, values: Mapping[str, str]) -> InstanceDocument:
    settings = dict(document.settings)
    if document.labels:
        settings["labels"] = _with_values(document.labels, values)
    used = values_in(yaml_text(settings), {**document.values, **values})
    return document.model_copy(update={"settings": settings, "values": used})


def _labels_of_instance(instance: WantedInstance | None) -> Mapping[str, str] | None:
    if instance is None or instance.text is None:
        return None
    (section,) = yaml_documents(instance.text)
    labels: dict[str, str] = section.get("labels", {})
    return labels


def _without_secret_values(values: Mapping[str, str], exported: ExportedText) -> dict[str, str]:
    return {name: value for name, value in values.items() if name not in exported.references}


def _remarks(what: str, values: Mapping[str, str], exported: ExportedText) -> tuple[str, ...]:
    """Return a remark for each variable that replaces a secret and has no value in the document."""
    missing = {*exported.hidden, *(exported.references & values.keys())}
    return tuple(
        f"{what}: a secret is not exported: set {name} where the copy runs" for name in sorted(missing)
    )


# --- Jobs -----------------------------------------------------------------------------------


def _export_job(job: JobSpec) -> ExportedDocument:
    exported = without_secrets(job.text, job.name)
    document = JobDocument(
        job=job.name,
        labels=dict(job.labels),
        verb=job.verb,  # type: ignore[arg-type]
        options=job.options,
        weight=job.weight,
        zone=job.zone,
        values=_without_secret_values(job.values, exported),
        text=exported.text,
    )
    remarks = _remarks(f"job {job.name}", job.values, exported)
    return ExportedDocument(document.model_dump(mode="json"), remarks)


def _job_of(document: JobDocument, values: Mapping[str, str]) -> JobSpec:
    own = values_in(document.text, {**document.values, **values})
    return JobSpec(
        job_name(Path(f"{document.job}.yaml"), document.text, own),
        document.verb,
        document.options,
        document.text,
        weight=document.weight,
        zone=document.zone,
        labels=_with_values(document.labels, values),
        values=own,
    )


def _labels_of_job(store: CoordinationStore, name: str) -> Mapping[str, str] | None:
    try:
        return read_job(store, name).labels
    except SourceMissing:
        return None


def _with_values(labels: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    return {name: values.get(name, value) for name, value in labels.items()}


def _refuse_another_unit(what: str, before: Mapping[str, str] | None, wanted: Mapping[str, str]) -> None:
    """Raise OptionInvalid if a stored unit has this name but other labels: a copy must not replace the
    original.
    """
    if before is not None and dict(before) != dict(wanted):
        shown = ", ".join(f"{name}={value}" for name, value in before.items()) or "none"
        raise OptionInvalid(
            f"{what} is there already, with other labels: {shown}",
            hint="Give the copy another name, by a ${NAME} in it, or apply it to another fleet",
        )


# --- Subscriptions --------------------------------------------------------------------------


def _export_subscription(store: CoordinationStore, subscription: Subscription) -> ExportedDocument:
    if store.get(subscription.account_path) is not None:
        remark = f"{full_name(subscription)} is a Canal client, which subscribes by itself"
        return ExportedDocument(None, (remark,))
    values = {
        "subscription": full_name(subscription),
        "labels": dict(subscription.labels),
        "tables": list(subscription.tables),
        "exclude": list(subscription.exclude),
        "shard_count": subscription.shard_count,
        "shard_columns": {table: list(names) for table, names in subscription.shard_columns.items()},
        "selection": subscription.selection.fields(),
        "paused": subscription.paused,
    }
    return ExportedDocument(values)


def _subscription_of(document: SubscriptionDocument, values: Mapping[str, str]) -> Subscription:
    instance, _, name = document.subscription.partition("/")
    set_fields = document.selection
    if set_fields.where is not None:
        Predicate.compile(set_fields.where)
    for tables, exclude in ((document.tables, document.exclude), (set_fields.tables, set_fields.exclude)):
        TablePatterns(list(tables or ()), list(exclude or ()))
    selection = Selection(
        set_fields.tables,
        set_fields.exclude,
        change_types(set_fields.changes),
        set_fields.where,
        sent_columns(set_fields.columns),
    )
    return Subscription(
        instance,
        name,
        tables=document.tables,
        exclude=document.exclude,
        shard_count=document.shard_count,
        shard_columns=document.shard_columns,
        selection=selection,
        paused=document.paused,
        labels=_with_values(document.labels, values),
    )


def _apply_subscription(registry: Subscriptions, wanted: Subscription) -> str:
    """Create a subscription, or set the selection, labels and paused state of an existing one."""
    created = registry.create(wanted)
    registry.select(wanted.instance, wanted.name, lambda _: wanted.selection)
    registry.pause(wanted.instance, wanted.name, paused=wanted.paused)
    now = registry.change(
        wanted.instance, wanted.name, lambda current: replace(current, labels=wanted.labels)
    )
    return f"{full_name(wanted)}: {'stored' if now == created else 'changed'}"
