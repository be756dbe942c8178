# SPDX-License-Identifier: Apache-2.0
"""Apache Iceberg as a target."""
