# SPDX-License-Identifier: Apache-2.0
"""Tables of a Spark catalog as a target."""
