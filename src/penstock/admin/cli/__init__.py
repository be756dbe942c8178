# SPDX-License-Identifier: Apache-2.0
"""The verbs of `penstock`: one file each, found by name. `app` puts them together."""
