# SPDX-License-Identifier: Apache-2.0
"""What a row's columns are, at a position: statements, definitions, history, proof."""
