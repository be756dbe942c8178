# SPDX-License-Identifier: Apache-2.0
"""A shop's tables, streamed from its database server into Delta tables while it is being written to.

    python -m demo

`shop` is the source, `mirror` the target, `verdict` compares the two, `screen` shows how far it is.
"""
