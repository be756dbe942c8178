# SPDX-License-Identifier: Apache-2.0
"""The code shared by sinks with SQL tables."""
