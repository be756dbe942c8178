# SPDX-License-Identifier: Apache-2.0
"""TiDB as a source: Pumps that receive binlogs from TiDB servers, and the Drainer that merges them."""
