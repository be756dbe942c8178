# SPDX-License-Identifier: Apache-2.0
"""Metrics: their definitions, the counters of events, and the two exports, Prometheus and OTLP."""
