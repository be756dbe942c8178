# SPDX-License-Identifier: Apache-2.0
"""The sources of log bytes: files, a live server, a log folder or a daemon. All are read as byte ranges."""
