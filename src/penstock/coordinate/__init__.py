# SPDX-License-Identifier: Apache-2.0
"""Who does what, and how far each has got: leases, membership, assignment and checkpoints over one store."""
