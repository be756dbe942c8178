# SPDX-License-Identifier: Apache-2.0
"""The log, its changes and its holds over HTTP."""
