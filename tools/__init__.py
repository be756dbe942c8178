# SPDX-License-Identifier: Apache-2.0
"""Programs for developers of Penstock. The product imports nothing from here."""
