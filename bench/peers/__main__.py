# SPDX-License-Identifier: Apache-2.0
"""Run one order: `python -m bench.peers '{"peer": ..., "verb": ..., "name": ..., "size": ...}'`."""

import sys

from .peer import carry_out

print(carry_out(sys.argv[1]))
