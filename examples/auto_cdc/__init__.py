# SPDX-License-Identifier: Apache-2.0
"""Changes of one table through a declarative pipeline, applied by AUTO CDC."""
