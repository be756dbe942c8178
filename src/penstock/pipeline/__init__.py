# SPDX-License-Identifier: Apache-2.0
"""Source, steps and sink as one job: what runs on Spark and what a relay runs without it."""
