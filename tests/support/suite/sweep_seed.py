# SPDX-License-Identifier: Apache-2.0
"""The seed of a long sweep:

`PENSTOCK_SEED`. If it is not set, each test uses the same random numbers in every run. `make test-long`
repeats the test files that import this module, once for each seed of a range.
"""

import os
import random

SEED = int(os.environ["PENSTOCK_SEED"]) if os.environ.get("PENSTOCK_SEED") else None

_SEEDS_APART = 1_000_003


def sweep_seed(default: int) -> int:
    """Return `default`, or another number for each seed of a sweep."""
    return default if SEED is None else default + SEED * _SEEDS_APART


def sweep_random(default: int | str) -> random.Random:
    """Return a generator seeded with `default`, or with `default` and the seed of the sweep."""
    return random.Random(default if SEED is None else f"{default} of sweep {SEED}")
