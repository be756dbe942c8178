# SPDX-License-Identifier: Apache-2.0
"""Proves that a pipeline's target is what its source is, and mends what is not.

`comparison` compares, `touched` tells what the log did behind a position, `report` keeps what was found,
`repair` writes it right.
"""
