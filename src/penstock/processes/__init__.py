# SPDX-License-Identifier: Apache-2.0
"""Captures in processes of their own, so that the end of one leaves the daemon and the others alone."""
