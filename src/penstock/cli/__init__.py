# SPDX-License-Identifier: Apache-2.0
"""The command line: one file for each verb, and the application that finds them."""
