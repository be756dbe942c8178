# SPDX-License-Identifier: Apache-2.0
"""MongoDB as a target."""
