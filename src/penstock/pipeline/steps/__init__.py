# SPDX-License-Identifier: Apache-2.0
"""One file for each verb, found by name. Each has `Settings` and `make`; see `penstock.pipeline.step`."""
