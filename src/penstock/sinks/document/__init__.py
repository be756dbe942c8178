# SPDX-License-Identifier: Apache-2.0
"""The code shared by the sinks that write one document for each row."""
