# SPDX-License-Identifier: Apache-2.0
"""A pipeline: source, steps and sink as one job, which runs with or without Spark."""
