# SPDX-License-Identifier: Apache-2.0
"""The sinks: one interface, and one folder for each kind of target. Nothing here imports Spark."""
