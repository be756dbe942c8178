# SPDX-License-Identifier: Apache-2.0
"""Cases: modules `<source>_to_<sink>`, found by name, with a `TITLE` and `run(options) -> CaseResult`."""
