# SPDX-License-Identifier: Apache-2.0
"""What speaks to a MySQL or MariaDB server: sessions, the replica protocol, result sets."""
