# SPDX-License-Identifier: Apache-2.0
"""The fleet: daemons that share out the capture of their instances over a coordination store."""
