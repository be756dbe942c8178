# SPDX-License-Identifier: Apache-2.0
"""MySQL, MariaDB and TiDB as a target."""
