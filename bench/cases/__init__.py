# SPDX-License-Identifier: Apache-2.0
"""Cases: one module `<source>_to_<sink>` each, found by name, with a `TITLE` and `run(options) ->
CaseResult`.
"""
