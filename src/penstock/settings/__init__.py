# SPDX-License-Identifier: Apache-2.0
"""The daemon's settings, and the value types of all settings."""
