# SPDX-License-Identifier: Apache-2.0
"""Redis as a target."""
