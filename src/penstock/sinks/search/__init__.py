# SPDX-License-Identifier: Apache-2.0
"""What the sinks of Elasticsearch and OpenSearch share."""
