# SPDX-License-Identifier: Apache-2.0
"""How a pipeline runs: a batch is planned, written down, done by tasks, committed, and noted as done.

Nothing here knows Spark: where tasks run is a `Driver`'s matter.
"""
