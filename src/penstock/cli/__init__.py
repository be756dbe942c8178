# SPDX-License-Identifier: Apache-2.0
"""The command line: a module for each verb, and the application that loads them."""
