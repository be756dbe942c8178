# SPDX-License-Identifier: Apache-2.0
"""The durable log of an instance: the server's bytes, unchanged, in segments that are binlog files."""
