# SPDX-License-Identifier: Apache-2.0
"""Translates the settings of other systems into Penstock settings: one reader for each system, one report for
all.
"""
