# SPDX-License-Identifier: Apache-2.0
"""Reading data definition statements."""
