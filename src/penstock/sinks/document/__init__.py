# SPDX-License-Identifier: Apache-2.0
"""The common part of the sinks that write a document for each row."""
