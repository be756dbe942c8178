# SPDX-License-Identifier: Apache-2.0
"""What several verbs share: logs and daemons as a verb names them, and rows for people."""
