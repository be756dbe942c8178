# SPDX-License-Identifier: Apache-2.0
"""Where coordination is kept: one file for each backend, found by name."""
