# SPDX-License-Identifier: Apache-2.0
"""What stands behind a session with a client of Canal: its filter, its cursor, and who holds which."""
