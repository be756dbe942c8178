# SPDX-License-Identifier: Apache-2.0
"""Canal's TCP protocol: frames, sessions, and where each client stands."""
