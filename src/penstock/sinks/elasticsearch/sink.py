# SPDX-License-Identifier: Apache-2.0
"""Elasticsearch: one index per table and one document per row, which contains the version of the row's last
change.
"""

from pydantic import Field

from penstock.model import Secret
from penstock.settings.values import SecretText
from penstock.sinks.search.search_sink import SearchSettings, SearchSink

EXTRA = "elasticsearch"


class Settings(SearchSettings):
    """An Elasticsearch cluster."""

    api_key: SecretText | None = Field(default=None, description="an API key, instead of user and password")


class ElasticsearchSink(SearchSink):
    """Writes documents to an Elasticsearch cluster."""

    settings: Settings
    kind = "elasticsearch"
    product = "Elasticsearch"
    other_kind = "opensearch"

    @property
    def api_key(self) -> Secret | None:
        return self.settings.api_key


make = ElasticsearchSink
