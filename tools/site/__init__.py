# SPDX-License-Identifier: Apache-2.0
"""The documentation as a site: the pages of this repository, and pages generated from errors and results."""
