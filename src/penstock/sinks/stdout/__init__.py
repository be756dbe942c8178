# SPDX-License-Identifier: Apache-2.0
"""Standard output as a target."""
