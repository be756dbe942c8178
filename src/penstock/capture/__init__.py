# SPDX-License-Identifier: Apache-2.0
"""Taking the log from a server: session, replica stream, schema history, precheck."""
