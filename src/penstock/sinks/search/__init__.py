# SPDX-License-Identifier: Apache-2.0
"""The code shared by the sinks for Elasticsearch and OpenSearch."""
