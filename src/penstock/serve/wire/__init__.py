# SPDX-License-Identifier: Apache-2.0
"""The messages of other systems' protocols, as bytes."""
