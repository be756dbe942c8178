# SPDX-License-Identifier: Apache-2.0
"""What people use at a terminal."""
