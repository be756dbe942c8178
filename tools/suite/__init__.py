# SPDX-License-Identifier: Apache-2.0
"""Runners of the test suite: long sweeps that resume, and repetitions under stress."""
