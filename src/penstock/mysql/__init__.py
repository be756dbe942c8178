# SPDX-License-Identifier: Apache-2.0
"""Communication with a MySQL or MariaDB server: sessions, the replica protocol, result sets."""
