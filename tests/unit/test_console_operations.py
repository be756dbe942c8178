# SPDX-License-Identifier: Apache-2.0
"""The operations of the console: their texts, their links, and the verbs that they stand for."""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from penstock.capture.status import State
from penstock.cli.app import make_app
from penstock.console import operation, pages, words
from penstock.console.operations import OPERATIONS
from penstock.pipeline.table_states import STATES
from penstock.serve.http.openapi import description
from tests.support.suite.nonempty import each

CONSOLE = Path(operation.__file__).parent


def texts_of_code() -> set[str]:
    """Return the texts that the console's code writes on pages."""
    texts = set()
    for file in each(CONSOLE.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "say":
                texts.add(ast.literal_eval(node.args[0]))
    return texts


def test_every_text_of_an_operation_has_a_translation() -> None:
    texts = texts_of_code()
    for known in each(OPERATIONS):
        texts |= {known.title, known.question}
        texts |= {shown.label for shown in known.inputs}
    assert texts - words.CHINESE.keys() == set()


def test_every_state_and_alert_has_a_translation() -> None:
    sources = "".join(path.read_text() for path in each(CONSOLE.parent.rglob("*.py")))
    alerts = set(re.findall(r'\b(?:Alert|_alert)\(\s*"([a-z ]+)"', sources))
    assert {"lag", "set aside", "pipeline failed"} <= alerts
    of_runs = {"loading", "running", "long batch", "waiting for changes", "retrying", "failed", "starting"}
    states = {*map(str, State), *STATES, *of_runs, "paused", "pausing", "never ran", "stopped", "finished"}
    assert (alerts | states) - words.CHINESE.keys() == set()


def test_every_operation_has_a_page_that_is_linked_from_another() -> None:
    templates = "".join(path.read_text() for path in (CONSOLE / "templates").glob("*.html"))
    assert [known.path for known in OPERATIONS if f"url('{known.path}'" not in templates] == []


# --- The verbs of the command line ------------------------------------------------------------

_INSTANCE = "/v1/instances/{instance}"
_SUBSCRIPTION = f"{_INSTANCE}/subscriptions/{{subscription}}"
# The records of a pipeline are in its state store, which the console opens itself.
_STORE = ""

# Each verb that the console has: the calls of the control API, and its pages.
IN_THE_CONSOLE: dict[str, tuple[str, str]] = {
    "alerts list": ("get /v1/alerts", "/alerts"),
    "alerts test": ("post /v1/alerts/test", "/alerts/test"),
    "as-of": (f"post {_INSTANCE}/as-of", "/as-of"),
    "check": (f"get {_INSTANCE}/check", "/check"),
    "fleet drain": ("post /v1/fleet/members/{member}/drain", "/fleet/drain"),
    "fleet status": ("get /v1/fleet", "/fleet"),
    "fleet undrain": ("post /v1/fleet/members/{member}/undrain", "/fleet/undrain"),
    "history": (f"post {_INSTANCE}/history", "/history"),
    "holds list": (f"get {_INSTANCE}/holds", "/instance"),
    "holds remove": (f"delete {_INSTANCE}/holds/{{reader}}", "/hold"),
    "inspect": (f"get {_INSTANCE}/transaction", "/transaction"),
    "instances forget": (f"post {_INSTANCE}/forget", "/instance/forget"),
    "instances list": ("get /v1/stored-instances", "/fleet"),
    "instances remove": (f"delete {_INSTANCE}", "/instance/remove"),
    "jobs delete": ("post /v1/jobs/{job}/delete", "/job/delete"),
    "jobs list": ("get /v1/jobs", "/fleet"),
    "jobs logs": ("get /v1/jobs/{job}", "/job"),
    "jobs move": ("post /v1/jobs/{job}/move", "/job/move"),
    "jobs pause": ("post /v1/jobs/{job}/pause", "/job/pause"),
    "jobs restart": ("post /v1/jobs/{job}/restart", "/job/restart"),
    "jobs resume": ("post /v1/jobs/{job}/resume", "/job/resume"),
    "jobs show": ("get /v1/jobs/{job}", "/job"),
    "log export": (f"get {_INSTANCE}/export", "/log/export"),
    "log list": (f"get {_INSTANCE}/segments", "/log"),
    "log show": (f"get {_INSTANCE}/status", "/instance"),
    "log verify": (f"post {_INSTANCE}/verify", "/log/verify"),
    "pipelines adopt": (_STORE, "/pipelines/adopt"),
    "pipelines dead-letters": (_STORE, "/dead-letters"),
    "pipelines list": (_STORE, "/pipelines"),
    "pipelines pause": (_STORE, "/pipelines/pause"),
    "pipelines purge": (_STORE, "/dead-letters/purge"),
    "pipelines replay": (_STORE, "/dead-letters/replay"),
    "pipelines reset": (_STORE, "/pipelines/reset"),
    "pipelines resume": (_STORE, "/pipelines/pause"),
    "pipelines show": (_STORE, "/pipelines"),
    "pipelines skip": (_STORE, "/pipelines/skip"),
    "pipelines tables": (_STORE, "/tables"),
    "position show": (f"get {_INSTANCE}/status", "/instance"),
    "pump decide": ("post /v1/pumps/{instance}/decide", "/pump/decide"),
    "pump status": ("get /v1/pumps", "/fleet"),
    "resnapshot": (_STORE, "/tables/resnapshot"),
    "resume": (f"post {_INSTANCE}/resume", "/instance/resume"),
    "schema set": (f"post {_INSTANCE}/definitions", "/definitions/set"),
    "schema show": (f"get {_INSTANCE}/definitions", "/definitions"),
    "status": ("get /v1/status", "/"),
    "subscriptions delete": (f"post {_SUBSCRIPTION}/delete", "/subscriptions/delete"),
    "subscriptions list": ("get /v1/subscriptions", "/subscriptions"),
    "subscriptions move": (f"post {_SUBSCRIPTION}/move", "/subscriptions/move"),
    "subscriptions pause": (f"post {_SUBSCRIPTION}/pause", "/subscriptions/pause"),
    "subscriptions reset": (f"post {_SUBSCRIPTION}/reset", "/subscriptions/reset"),
    "subscriptions resize": (f"post {_SUBSCRIPTION}/resize", "/subscriptions/resize"),
    "subscriptions resume": (f"post {_SUBSCRIPTION}/resume", "/subscriptions/pause"),
    "subscriptions set": (f"post {_SUBSCRIPTION}/set", "/subscriptions/set"),
    "subscriptions show": ("get /v1/subscriptions", "/subscriptions"),
    "tail": (f"post {_INSTANCE}/changes", "/tail"),
    "verify": (_STORE, "/compare"),
}

_STARTS = "starts a process in a terminal or a service"
_FILES = "reads or writes files of this host"
_STOPPED = "its daemon is stopped first, and the console shows running systems"

# Each verb that the console does not have, with the reason.
ON_THE_COMMAND_LINE: dict[str, str] = {
    "apply": "the text of a pipeline may have passwords; the console stores instances: /instances/apply",
    "compare": _FILES,
    "console": _STARTS,
    "demo": _STARTS,
    "export": _FILES,
    "init": _FILES,
    "log locate": "the time machine and the transaction page take a time, a GTID or a position",
    "log trim": _STOPPED,
    "migrate bifrost": _FILES,
    "migrate canal": _FILES,
    "migrate debezium": _FILES,
    "migrate drainer": _FILES,
    "migrate maxwell": _FILES,
    "migrate ptubes": _FILES,
    "position accept": _STOPPED,
    "position set": _STOPPED,
    "relay": _STARTS,
    "run": _STARTS,
    "serve": _STARTS,
    "worker": _STARTS,
}


def test_every_verb_is_in_the_console_or_has_a_reason_not_to_be() -> None:
    verbs = {
        f"{name} {word}".strip()
        for name in make_group()
        for word in (getattr(make_group()[name], "commands", None) or [""])
    }
    assert verbs == IN_THE_CONSOLE.keys() | ON_THE_COMMAND_LINE.keys()
    assert not IN_THE_CONSOLE.keys() & ON_THE_COMMAND_LINE.keys()


def test_page_and_call_of_every_verb_exist() -> None:
    paths = description()["paths"]
    for verb, (call, page) in each(IN_THE_CONSOLE.items()):
        assert page in pages.PAGES, verb
        method, _, path = call.partition(" ")
        assert call == _STORE or method in paths[path], verb


def make_group() -> Mapping[str, Any]:
    """Return the command of each verb, by name."""
    group: Any = typer.main.get_command(make_app())
    commands: Mapping[str, Any] = group.commands
    return commands
