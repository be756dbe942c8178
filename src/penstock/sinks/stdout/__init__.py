# SPDX-License-Identifier: Apache-2.0
"""standard output as a target."""
