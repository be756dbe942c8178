# SPDX-License-Identifier: Apache-2.0
"""How a pipeline runs: plan a batch, record the plan, run the tasks, commit the batch, and record it as done.

Nothing in this package depends on Spark. A `Driver` runs the tasks.
"""
