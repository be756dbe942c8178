# SPDX-License-Identifier: Apache-2.0
"""The columns of a row at a position: statements, definitions, history, proof."""
