# SPDX-License-Identifier: Apache-2.0
"""Where changes go: one seam, and one folder for each kind of target. Nothing here imports Spark."""
