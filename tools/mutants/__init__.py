# SPDX-License-Identifier: Apache-2.0
"""Mutation testing of the kernel and of the Python code: change one expression, and see which test fails."""
