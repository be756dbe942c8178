# SPDX-License-Identifier: Apache-2.0
"""Delta Lake as a target."""
