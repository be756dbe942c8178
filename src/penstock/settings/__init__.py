# SPDX-License-Identifier: Apache-2.0
"""What the daemon is told, and what all settings are made of."""
