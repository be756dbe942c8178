# SPDX-License-Identifier: Apache-2.0
"""Settings of other systems as settings of Penstock: a reader for each original, one report for all."""
