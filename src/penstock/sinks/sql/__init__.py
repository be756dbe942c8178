# SPDX-License-Identifier: Apache-2.0
"""What sinks with SQL tables share."""
