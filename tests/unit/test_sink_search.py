# SPDX-License-Identifier: Apache-2.0
"""The sinks of Elasticsearch and OpenSearch, without a cluster: their settings, and their handling of
responses.
"""

import json

import pytest

from penstock.errors import ServerBusy
from penstock.sinks.sink import make_sink, settings_of
from tests.support.sinks.http_endpoint import HttpEndpoint


@pytest.mark.parametrize("kind", ["elasticsearch", "opensearch"])
def test_search_that_lacks_the_documents_of_a_shard_is_tried_again(kind: str) -> None:
    """If the documents of a shard were skipped, rows of an emptied table would remain."""
    page = {"_scroll_id": "a", "hits": {"hits": []}, "_shards": {"total": 2, "successful": 2, "failed": 0}}
    with HttpEndpoint() as endpoint:
        sink = make_sink(kind, settings_of(kind).model_validate({"url": endpoint.url}))
        endpoint.answer(200, 200, Content_Type="application/json")
        failed = page | {"_shards": {"total": 2, "successful": 1, "failed": 1}}
        endpoint.bodies.extend(json.dumps(body).encode() for body in (page, failed))
        client = sink.connect()
        assert client.request("POST", "shop.orders", "/_search", {})["_scroll_id"] == "a"
        with pytest.raises(ServerBusy, match="1 of 2 shards"):
            client.request("POST", "shop.orders", "/_search", {})
        client.close()


@pytest.mark.parametrize(
    "url",
    [
        "http://loader:open-word@one:9200,http://loader:open-word@two:9200",
        "http://one:9200, http://loader:open-word@two:9200",
    ],
)
def test_accounts_are_removed_from_each_url_of_a_list(url: str) -> None:
    settings = settings_of("opensearch").model_validate({"url": url})
    assert "open-word" not in repr(settings) + settings.url
    assert settings.url.replace(" ", "") == "http://one:9200,http://two:9200"
    assert settings.user == "loader"
    secret = settings.secret()
    assert secret is not None
    assert secret.reveal() == "open-word"
