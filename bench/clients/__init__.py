# SPDX-License-Identifier: Apache-2.0
"""Clients that drain what Penstock serves: programs of other languages, built when first needed."""
