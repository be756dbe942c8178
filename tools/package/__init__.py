# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.package`: build the source distribution and the wheels, and check that they work."""
