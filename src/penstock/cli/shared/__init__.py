# SPDX-License-Identifier: Apache-2.0
"""Code shared by several verbs: selecting logs and daemons, and printing rows."""
