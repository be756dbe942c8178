# SPDX-License-Identifier: Apache-2.0
"""Elasticsearch as a target."""
