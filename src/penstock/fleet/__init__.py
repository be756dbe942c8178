# SPDX-License-Identifier: Apache-2.0
"""The fleet: daemons that divide the capture of their instances among themselves, through a coordination
store.
"""
