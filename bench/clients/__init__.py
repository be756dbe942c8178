# SPDX-License-Identifier: Apache-2.0
"""Clients of Penstock's protocols: programs in other languages, built on first use."""
