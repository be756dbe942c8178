# SPDX-License-Identifier: Apache-2.0
"""One module per verb, loaded by its name. Each has `Settings` and `make`; see `penstock.pipeline.step`."""
