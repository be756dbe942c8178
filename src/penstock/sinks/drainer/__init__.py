# SPDX-License-Identifier: Apache-2.0
"""Files of TiDB-Binlog's Drainer as a target."""
