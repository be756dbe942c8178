# SPDX-License-Identifier: Apache-2.0
"""The operations of a fleet: its jobs, and members that hand over their work."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from penstock.console.operation import Fields, Input, Operation, Sentence, say
from penstock.console.visit import Visit
from penstock.errors import OptionInvalid

_JOB, _MEMBER = ("daemon", "job"), ("daemon", "member")
# No timestamp of 63 bits has more digits.
_TIMESTAMP_DIGITS_MAX = 19


def _send_job(visit: Visit, fields: Fields, word: str, body: dict[str, Any]) -> dict[str, Any]:
    call = f"jobs/{quote(fields['job'], safe='')}/{word}"
    before: dict[str, Any] = visit.fleet.change(fields["daemon"], call, body)["before"]
    return before


def _send_member(visit: Visit, fields: Fields, word: str, body: dict[str, Any]) -> list[str]:
    call = f"fleet/members/{quote(fields['member'], safe='')}/{word}"
    held: list[str] = visit.fleet.change(fields["daemon"], call, body)["before"]
    return held


def _change_job(word: str, visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    before = _send_job(visit, fields, word, {"dry_run": dry_run})
    worker = before["worker"] or say("no worker")
    sentences = [
        say("It is {state} now, on {worker}.", state=Sentence(before["state"] or "unplaced"), worker=worker)
    ]
    if word in ("pause", "resume") and before["paused"] == (word == "pause"):
        return []
    return [*sentences, _JOB_EFFECTS[word]]


_JOB_EFFECTS = {
    "pause": say(
        "Its process stops after its current batch, and does not start again before the job is resumed. Its"
        " target falls behind."
    ),
    "resume": say("A worker starts it again, at the position where it stopped."),
    "restart": say(
        "Its process stops after its current batch and is started again, with the settings as they were"
        " applied last. A job that has ended is started too."
    ),
    "delete": say(
        "Its process stops, and the job with the text of its pipeline is forgotten. Its target and the"
        " pipeline's state stay: the same pipeline goes on where it stopped if it is applied again."
    ),
}


def _move_job(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    worker = fields["worker"] or None
    before = _send_job(visit, fields, "move", {"worker": worker, "dry_run": dry_run})
    running_on = before["worker"] or say("no worker")
    if worker is None:
        return [say("It runs on {worker} now. From then on any worker may run it.", worker=running_on)]
    return [
        say(
            "It runs on {before} now. It stops there, and {worker} starts it.",
            before=running_on,
            worker=worker,
        ),
        say("Others run it while {worker} is away or drained.", worker=worker),
    ]


def _workers(visit: Visit, fields: Fields) -> Mapping[str, Sequence[str]]:
    workers = visit.fleet.ask_daemon(fields["daemon"], "jobs")["workers"]
    return {"worker": [worker["member"] for worker in workers]}


def _drain(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    at_once = bool(fields["at_once"])
    held = _send_member(visit, fields, "drain", {"at_once": at_once, "dry_run": dry_run})
    return [
        say("It hands these instances and jobs over to others: {names}", names=", ".join(held))
        if held
        else say("It has no instance and no job now."),
        say(
            "It keeps running, and gets no work until it is undrained. Clients are sent to the other members."
        ),
        say("Logs are handed over at once: a copy that is behind reads the rest from the server.")
        if at_once
        else say("It captures an instance until a copy of its log is in step, if the log has copies."),
    ]


def _undrain(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    _send_member(visit, fields, "undrain", {"dry_run": dry_run})
    return [say("It gets its share of the instances and jobs again.")]


def _job_operation(word: str, title: str, question: str, back: str = "/job") -> Operation:
    return Operation(
        f"/job/{word}",
        title,
        question,
        f"{word} job",
        _JOB,
        partial(_change_job, word),
        back,
        back_fields=_JOB if back == "/job" else (),
        is_harmless=word == "resume",
    )


def _decide(visit: Visit, fields: Fields, dry_run: bool) -> Sequence[Sentence]:
    start_ts, commit_ts = (_timestamp(fields[name]) for name in ("start_ts", "commit_ts"))
    if bool(commit_ts) == bool(fields["rollback"]):
        raise OptionInvalid(
            "the decision is not clear", hint="Write a commit timestamp, or choose the rollback"
        )
    call = f"pumps/{quote(fields['instance'], safe='')}/decide"
    body = {"start_ts": start_ts, "commit_ts": commit_ts, "dry_run": dry_run}
    answer = visit.fleet.change(fields["daemon"], call, body)
    stalled = answer["stalled_by"]
    decided = (
        say("Its changes are committed at {commit_ts}.", commit_ts=commit_ts)
        if commit_ts
        else say("Its changes are dropped.")
    )
    waiting = (
        say("All later transactions wait for it.")
        if stalled is not None and stalled["start_ts"] == start_ts
        else say("The Pump does not wait for this transaction now. The decision waits until it arrives.")
    )
    wrong = say("A wrong decision loses changes, or adds changes that the cluster does not have.")
    return [decided, waiting, wrong]


def _timestamp(text: str) -> int:
    """Return a timestamp of TiDB, 0 for no text. Raises OptionInvalid."""
    if not text:
        return 0
    if not text.isascii() or not text.isdecimal() or len(text) > _TIMESTAMP_DIGITS_MAX:
        raise OptionInvalid(
            f"{text[:64]!r} is no timestamp of TiDB", hint="Write it as reported: 470639218043387904"
        )
    return int(text)


OPERATIONS = (
    Operation(
        "/pump/decide",
        "Decide the transaction",
        "What happens if this outcome of the transaction is decided?",
        "decide transaction",
        ("daemon", "instance"),
        _decide,
        "/fleet",
        (
            Input("start_ts", "Its start timestamp", is_needed=True, example="470639218043387904"),
            Input("commit_ts", "Its commit timestamp, if it was committed", example="470639218044174336"),
            Input("rollback", "It was rolled back", kind="check"),
        ),
    ),
    _job_operation("pause", "Pause the job", "What happens if this job is paused?"),
    _job_operation("resume", "Resume the job", "What happens if this job is resumed?"),
    _job_operation("restart", "Restart the job", "What happens if this job is restarted?"),
    _job_operation("delete", "Delete the job", "What is lost if this job is deleted?", back="/fleet"),
    Operation(
        "/job/move",
        "Move the job",
        "What happens if a worker gets this job?",
        "move job",
        _JOB,
        _move_job,
        "/job",
        (Input("worker", "Worker (none: any)"),),
        back_fields=_JOB,
        suggest=_workers,
    ),
    Operation(
        "/fleet/drain",
        "Drain the member",
        "What happens if this member is drained?",
        "drain member",
        _MEMBER,
        _drain,
        "/fleet",
        (Input("at_once", "Hand over at once", kind="check"),),
    ),
    Operation(
        "/fleet/undrain",
        "Undrain the member",
        "What happens if this member works again?",
        "undrain member",
        _MEMBER,
        _undrain,
        "/fleet",
        is_harmless=True,
    ),
)
