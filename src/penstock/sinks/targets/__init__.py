# SPDX-License-Identifier: Apache-2.0
"""One file for each kind of sink, found by name, with `Settings` and `make`; see `penstock.sinks.sink`."""
