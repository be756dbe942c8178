# SPDX-License-Identifier: Apache-2.0
"""Examples that run; tests run them."""
