# SPDX-License-Identifier: Apache-2.0
"""Programs and libraries to compare: a module per peer, found by name, with one interface (`peer`)."""
