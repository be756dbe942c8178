# SPDX-License-Identifier: Apache-2.0
"""What a server's settings and tables would break or hide, found before the start."""
