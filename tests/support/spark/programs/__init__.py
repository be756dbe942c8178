# SPDX-License-Identifier: Apache-2.0
"""Programs that tests run in separate processes, because a Spark session cannot change its kind or master."""
