# SPDX-License-Identifier: Apache-2.0
"""Coordination of subscribers over one store: leases, membership, shard assignment and checkpoints."""
