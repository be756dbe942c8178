# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in processes of their own: a Spark session has one kind and one master for life."""
