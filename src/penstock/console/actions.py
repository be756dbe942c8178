# SPDX-License-Identifier: Apache-2.0
"""The console's actions. Before each action, a page describes its effect. Every action requires an admin and
is recorded.
"""

from collections import Counter
from collections.abc import Callable, Mapping

from starlette.responses import Response

from penstock.console import operations
from penstock.console.forms import THIS_MACHINE as _THIS_MACHINE
from penstock.console.forms import needed_field as _field
from penstock.console.forms import needed_number as _number
from penstock.console.forms import record_action as _record
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid
from penstock.pipeline.dead_letter import dead_letters, purgeable_letters
from penstock.pipeline.settings import PipelineSettings


def remove_hold(visit: Visit, form: Mapping[str, str]) -> Response:
    """Remove a hold of a log."""
    visit.prove_admin()
    url, name, reader = (_field(form, field) for field in ("daemon", "instance", "reader"))
    visit.fleet.remove_hold(url, name, reader)
    _record(visit, "remove hold", daemon=url, instance=name, reader=reader)
    return visit.redirect("/instance", daemon=url, instance=name)


def resume_capture(visit: Visit, form: Mapping[str, str]) -> Response:
    """Start the capture of an instance that was set aside."""
    visit.prove_admin()
    url, name = (_field(form, field) for field in ("daemon", "instance"))
    visit.fleet.resume_capture(url, name)
    _record(visit, "resume capture", daemon=url, instance=name)
    return visit.redirect("/instance", daemon=url, instance=name)


def pause_pipeline(visit: Visit, form: Mapping[str, str]) -> Response:
    """Stop a pipeline after its current batch."""
    visit.prove_sees_pipelines()
    name, why = _field(form, "name"), form.get("why", "")
    visit.states.pause(_store(form), name, why)
    _record(visit, "pause pipeline", pipeline=name, why=why)
    return visit.redirect("/pipelines")


def resume_pipeline(visit: Visit, form: Mapping[str, str]) -> Response:
    """Allow a paused pipeline to start again."""
    visit.prove_sees_pipelines()
    name = _field(form, "name")
    visit.states.resume(_store(form), name)
    _record(visit, "resume pipeline", pipeline=name)
    return visit.redirect("/pipelines")


def replay_letters(visit: Visit, form: Mapping[str, str]) -> Response:
    """Replay the entries that the preview showed, and record the action even if an entry fails."""
    visit.prove_sees_pipelines()
    name, sink, entry = _field(form, "name"), form.get("sink", ""), form.get("entry", "")
    store = _store(form)
    settings = visit.files.settings(store, name, sink)
    entries = _previewed_entries(settings, form)
    counts = Counter(written=0, read_again=0, rejected=0)
    try:
        for outcome in visit.files.replay(settings, entries):
            counts.update(written=outcome.written, read_again=outcome.read_again, rejected=outcome.rejected)
    finally:
        shown = {count: str(rows) for count, rows in counts.items()}
        _record(visit, "replay rejected rows", pipeline=name, sink=sink, entry=entry or "all", **shown)
    return visit.redirect("/dead-letters", store=str(store), name=name, sink=sink, **shown)


def purge_letters(visit: Visit, form: Mapping[str, str]) -> Response:
    """Delete the entries that the preview has shown, for good."""
    visit.prove_sees_pipelines()
    name, sink, entry = _field(form, "name"), form.get("sink", ""), form.get("entry", "")
    store = _store(form)
    settings = visit.files.settings(store, name, sink)
    letters = purgeable_letters(settings, _previewed_entries(settings, form))
    rows, why = str(sum(letter.rows for letter in letters)), form.get("why", "")
    # Record the purge before the first entry is deleted, so that a failure halfway is also recorded.
    _record(visit, "purge rejected rows", pipeline=name, sink=sink, entry=entry or "all", rows=rows, why=why)
    visit.files.purge(settings, letters, visit.account or _THIS_MACHINE, why)
    return visit.redirect("/dead-letters", store=str(store), name=name, sink=sink, purged=rows)


def _previewed_entries(settings: PipelineSettings, form: Mapping[str, str]) -> list[str]:
    """Return the names of the entries that a preview showed. Raises OptionInvalid if any are missing."""
    entry, count, until_us = form.get("entry", ""), _number(form, "count"), _number(form, "until_us")
    names = [
        letter.name
        for letter in dead_letters(settings)
        if entry in ("", letter.name) and letter.noted_us <= until_us
    ]
    if not names or len(names) != count:
        raise OptionInvalid(
            "the rejected rows are not those of the page any more", hint="Open its page again"
        )
    return names


def start_comparison(visit: Visit, form: Mapping[str, str]) -> Response:
    """Compare a pipeline's target with its source."""
    return _compare(visit, form, repair=False)


def start_repair(visit: Visit, form: Mapping[str, str]) -> Response:
    """Compare a pipeline's target with its source, and correct the rows of the target that differ."""
    return _compare(visit, form, repair=True)


def _compare(visit: Visit, form: Mapping[str, str], *, repair: bool) -> Response:
    visit.prove_sees_pipelines()
    store, name, sink = _store(form), _field(form, "name"), form.get("sink", "")
    visit.comparisons.start((store, name, sink), visit.files.path(store, name), repair=repair)
    _record(visit, "repair target" if repair else "compare target", pipeline=name, sink=sink)
    return visit.redirect("/compare", store=str(store), name=name, sink=sink)


def reset_subscription(visit: Visit, form: Mapping[str, str]) -> Response:
    """Set the checkpoints of a subscription to the position shown on its page."""
    visit.prove_admin()
    url, name, subscription, position = (
        _field(form, field) for field in ("daemon", "instance", "subscription", "position")
    )
    shard = form.get("shard", "")
    body = {
        "to": {"position": position},
        "shard": int(shard) if shard.isdecimal() else None,
        "dry_run": False,
        "force": True,
    }
    visit.fleet.reset_subscription(url, name, subscription, body)
    _record(
        visit,
        "reset subscription",
        daemon=url,
        instance=name,
        subscription=subscription,
        shard=shard or "all",
        position=position,
    )
    return visit.redirect("/subscriptions")


def pause_subscription(visit: Visit, form: Mapping[str, str]) -> Response:
    """Stop delivering to a subscription."""
    return _set_paused(visit, form, paused=True)


def resume_subscription(visit: Visit, form: Mapping[str, str]) -> Response:
    """Resume a paused subscription at its checkpoints."""
    return _set_paused(visit, form, paused=False)


def _set_paused(visit: Visit, form: Mapping[str, str], *, paused: bool) -> Response:
    visit.prove_admin()
    url, name, subscription = (_field(form, field) for field in ("daemon", "instance", "subscription"))
    visit.fleet.pause_subscription(url, name, subscription, paused=paused)
    action = "pause subscription" if paused else "resume subscription"
    _record(visit, action, daemon=url, instance=name, subscription=subscription)
    return visit.redirect("/subscriptions")


def _store(form: Mapping[str, str]) -> int:
    return _number(form, "store")


ACTIONS: dict[str, Callable[[Visit, Mapping[str, str]], Response]] = {
    **operations.ACTIONS,
    "/hold/remove": remove_hold,
    "/instance/resume/confirm": resume_capture,
    "/pipelines/pause/confirm": pause_pipeline,
    "/pipelines/resume/confirm": resume_pipeline,
    "/dead-letters/replay/confirm": replay_letters,
    "/dead-letters/purge/confirm": purge_letters,
    "/compare/start": start_comparison,
    "/compare/repair/confirm": start_repair,
    "/subscriptions/reset/confirm": reset_subscription,
    "/subscriptions/pause/confirm": pause_subscription,
    "/subscriptions/resume/confirm": resume_subscription,
}
