# SPDX-License-Identifier: Apache-2.0
"""Source, steps and sink as one job, which a driver runs with or without Spark."""
