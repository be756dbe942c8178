# SPDX-License-Identifier: Apache-2.0
"""Pipelines on Spark: the driver's loop, one job for each batch, and what its tasks do."""
