# SPDX-License-Identifier: Apache-2.0
"""The common part of sinks with lake tables, for all formats."""
