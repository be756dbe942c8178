# SPDX-License-Identifier: Apache-2.0
"""OpenSearch: one index per table and one document per row, which contains the version of the row's last
change.
"""

from penstock.sinks.search.search_sink import SearchSettings, SearchSink

EXTRA = "opensearch"


class Settings(SearchSettings):
    """An OpenSearch cluster."""


class OpensearchSink(SearchSink):
    """Writes documents to an OpenSearch cluster."""

    kind = "opensearch"
    product = "OpenSearch"
    other_kind = "elasticsearch"


make = OpensearchSink
