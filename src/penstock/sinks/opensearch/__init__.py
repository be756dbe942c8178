# SPDX-License-Identifier: Apache-2.0
"""OpenSearch as a target."""
