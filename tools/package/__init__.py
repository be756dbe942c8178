# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.package`: the source distribution and the wheels, built and proved."""
