# SPDX-License-Identifier: Apache-2.0
"""HTTP as a target."""
