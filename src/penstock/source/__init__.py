# SPDX-License-Identifier: Apache-2.0
"""Where log bytes come from: files, or a live server. Everything is a byte range."""
