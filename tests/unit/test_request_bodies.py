# SPDX-License-Identifier: Apache-2.0
"""Request bodies that no Penstock client would send to a daemon."""

import re

import pytest

from tests.support.daemon.served_log import INSTANCE, captured_log, serving


@pytest.mark.parametrize("body", [b'{"a":' * 20_000, b"[" * 20_000 + b"]" * 20_000])
def test_deeply_nested_body_is_refused_by_every_call(body: bytes) -> None:
    with captured_log() as log, serving(log) as daemon:
        refused = set()
        for path, methods in daemon.ask("GET", "/v1/openapi.json").json["paths"].items():
            for method in {"post", "put", "delete"} & methods.keys():
                call = re.sub(r"\{\w+\}", "some", path.replace("{instance}", INSTANCE))
                query = f"table=fuzzed.t&position={log.earliest()}"
                answer = daemon.ask(method.upper(), f"{call}?{query}", body)
                # Calls that take no body ignore a body.
                assert answer.status < 500 or answer.status == 503, (call, answer.json)
                refused |= {path.rpartition("/")[2]} if answer.status == 400 else set()
    assert refused >= {"schema", "changes", "history", "as-of"}
