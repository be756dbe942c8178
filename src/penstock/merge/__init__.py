# SPDX-License-Identifier: Apache-2.0
"""Instances that merge the logs of other instances of the daemon, in commit order."""
