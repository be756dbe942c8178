# SPDX-License-Identifier: Apache-2.0
"""How a pipeline runs: plan a batch, record it, run its tasks, commit it, and record it as done.

Nothing here depends on Spark. A `Driver` runs the tasks.
"""
