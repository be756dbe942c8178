# SPDX-License-Identifier: Apache-2.0
"""A shop's tables, kept equal in Delta while the shop writes: `penstock run`, a SIGKILL, `penstock verify`.

    python -m demo

`shop` is the source and its writer, `pipeline` the pipeline's file and process, `screen` shows how far it is.
"""
