# SPDX-License-Identifier: Apache-2.0
"""The protocols that a listener speaks, one file each."""
