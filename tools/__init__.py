# SPDX-License-Identifier: Apache-2.0
"""Programs for people who work on Penstock. The product imports nothing from here."""
