# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries measured beside each other: one module per peer, found by name, one contract
(`peer`).
"""
