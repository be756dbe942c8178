# SPDX-License-Identifier: Apache-2.0
"""The OpenSearch sink: on a real node, and with the responses of a server that requires authentication."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import (
    AuthenticationFailed,
    OptionInvalid,
    PenstockError,
    PrivilegeMissing,
    SchemaChanged,
    ServerBusy,
    TlsFailed,
    ValueMalformed,
)
from penstock.sinks.sink import make_sink, settings_of
from tests.conftest import ROOT
from tests.support.pipeline.changes_made import changes_of, delete, insert, target_of, update
from tests.support.programs.write_keys import ORDERS, ROWS, batch
from tests.support.sinks.backends import OpenSearchBackend, running_backend
from tests.support.sinks.http_endpoint import HttpEndpoint
from tests.support.sinks.writing import write
from tests.support.suite.fixture_types import MissingPart
from tests.support.suite.own_servers import started
from tests.support.suite.patience import wait_until
from tools.opensearch import OpenSearch, SecuredOpenSearch
from tools.servers import Server, certificate


@pytest.fixture
def server(
    pytestconfig: pytest.Config, server_of: Callable[[str], Server], missing_part: MissingPart
) -> OpenSearch:
    """The shared node."""
    backend = running_backend("opensearch", pytestconfig, server_of, missing_part)
    assert isinstance(backend, OpenSearchBackend)
    server: OpenSearch = backend.server
    return server


@pytest.fixture
def sink(server: OpenSearch) -> Iterator[Any]:
    sink = make_sink("opensearch", settings_of("opensearch")(url=server.url, refresh="now"))
    yield sink
    sink.close()


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_every_type_is_read_back_unchanged")
def test_documents_are_searchable(sink: Any) -> None:
    columns = {"id": "bigint", "price": "decimal(10,2)", "at": "datetime(3)", "note": "text", "doc": "json"}
    target = target_of(columns, name="shop.Searched Values")
    values = {"id": 1, "price": Decimal("-1.50"), "note": "Quick brown foxes", "doc": '{"a": [1.50]}'}
    write(sink, changes_of(target, insert(5, **values), insert(5, 1, id=2, price=Decimal("2.00"))))
    stale = write(sink, changes_of(target, update(4, {"id": 1}, {"id": 1, "note": "stale"})))
    assert stale.outdated == 1
    for query in ({"match": {"note": "brown"}}, {"range": {"price": {"lt": 0}}}):
        answer = sink.client.request("POST", "shop.searched_values", "/_search", {"query": query})
        [hit] = answer["hits"]["hits"]
        assert (hit["_id"], hit["_source"]["doc"]) == ("1", {"a": ["1.50"]})


@pytest.mark.deep(
    guard="tests/integration/test_sink_opensearch.py::test_answer_becomes_the_error_of_its_status"
)
def test_server_of_the_other_product_is_refused(server: OpenSearch) -> None:
    [finding] = make_sink("elasticsearch", settings_of("elasticsearch")(url=server.url)).check()
    assert finding.fatal
    assert "opensearch" in finding.mend


@pytest.mark.deep(guard="tests/conformance/test_sinks.py::test_repeated_batch_changes_nothing")
def test_killed_writer_leaves_every_row_once_when_its_batch_is_retried(server: OpenSearch) -> None:
    options = {"url": server.url, "refresh": "now", "index": "killed.{table}", "gather_bytes": 200_000}
    sink: Any = make_sink("opensearch", settings_of("opensearch")(**options))
    settings = sink.settings.model_dump_json()
    words = [sys.executable, "-m", "tests.support.programs.write_keys", "opensearch", settings]

    def count() -> int:
        answer = sink.client.request("GET", "killed.orders", "/_count", accepted=[404, 503])
        return 0 if answer is None else int(answer["count"])

    with subprocess.Popen(words, cwd=ROOT) as writer:
        wait_until(lambda: count() > ROWS // 20)
        writer.kill()
    write(sink, *batch())
    assert count() == ROWS
    assert sum(rows.num_rows for rows in sink.read(ORDERS)) == ROWS
    sink.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("opensearch") / "tls"
    certificate.make(folder)
    return folder / "authority.pem"


@pytest.fixture(scope="module")
def secured(authority: Path, missing_part: MissingPart) -> Iterator[SecuredOpenSearch]:
    """A node with the security plugin."""
    with started(SecuredOpenSearch(authority.parent), "opensearch", missing_part) as server:
        yield server


@pytest.mark.deep(
    guard="tests/integration/test_sink_opensearch.py::test_answer_becomes_the_error_of_its_status"
)
def test_security_plugin_lets_the_rights_of_the_guide_write(
    secured: SecuredOpenSearch, authority: Path
) -> None:
    def sink_of(**more: Any) -> Any:
        account = {"user": "loader", "password": secured.PASSWORD, "ca": authority}
        options = {"url": secured.url, "refresh": "now", **account, **more}
        return make_sink("opensearch", settings_of("opensearch")(**options))

    target = target_of({"id": "int", "name": "text"}, name="shop.secured")
    wider = target_of({"id": "int", "name": "text", "price": "decimal(10,2)"}, name="shop.secured")
    sink = sink_of()
    assert list(sink.check()) == []
    write(sink, changes_of(target, insert(5, id=1, name="a"), insert(5, 1, id=2, name="b")))
    write(sink, changes_of(wider, update(6, {"id": 1}, {"id": 1, "name": "é", "price": Decimal("1.50")})))
    write(sink, changes_of(wider, delete(7, id=2, name="b")))
    [rows] = sink.read(wider)
    assert rows.to_pylist() == [{"id": 1, "name": "é", "price": Decimal("1.50")}]
    sink.close()
    with pytest.raises(AuthenticationFailed) as refused:
        sink_of(password="wrong-word").check()
    assert "wrong-word" not in str(refused.value)
    for other in (sink_of(user="reader"), sink_of(index="elsewhere")):
        with pytest.raises(PrivilegeMissing):
            write(other, changes_of(wider, insert(8, id=3)))
    with pytest.raises(TlsFailed):
        sink_of(ca=None).check()


@pytest.mark.parametrize(
    ("status", "answer", "kind"),
    [
        (401, "Unauthorized", AuthenticationFailed),
        (403, '{"error": {"type": "security_exception", "reason": "no permissions"}}', PrivilegeMissing),
        (403, '{"error": {"type": "cluster_block_exception", "reason": "flood stage"}}', ServerBusy),
        (429, '{"error": {"type": "rejected_execution_exception", "reason": "queue full"}}', ServerBusy),
        (404, '{"error": {"type": "index_not_found_exception", "reason": "no such index"}}', SchemaChanged),
        (400, '{"error": {"type": "mapper_parsing_exception", "reason": "no number"}}', ValueMalformed),
        (200, '{"status": "green"}', None),
    ],
)
def test_answer_becomes_the_error_of_its_status(
    status: int, answer: str, kind: type[PenstockError] | None
) -> None:
    with HttpEndpoint() as endpoint:
        # The transport repeats a request that a busy server refuses.
        kind_of_content = "application/json" if answer.startswith("{") else "text/plain"
        product = {"X_Elastic_Product": "Elasticsearch"} if kind is None else {}
        endpoint.answer(*[status] * 8, Content_Type=kind_of_content, **product)
        endpoint.refusal = answer.encode()
        endpoint.bodies.append(answer.encode())
        url = endpoint.url.replace("://", "://loader:open-word@")
        sink = make_sink("opensearch", settings_of("opensearch")(url=url))
        if kind is None:
            [finding] = sink.check()
            assert "elasticsearch" in finding.mend
            return
        with pytest.raises(kind) as failed:
            sink.check()
        assert "open-word" not in str(failed.value)
        sink.close()


def test_url_without_a_port_is_refused() -> None:
    with pytest.raises(OptionInvalid, match="is no OpenSearch server"):
        make_sink("opensearch", settings_of("opensearch")(url="search")).check()
