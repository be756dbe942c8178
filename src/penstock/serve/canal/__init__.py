# SPDX-License-Identifier: Apache-2.0
"""Canal's TCP protocol: frames, sessions, and the positions of clients."""
