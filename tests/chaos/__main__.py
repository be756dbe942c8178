# SPDX-License-Identifier: Apache-2.0
"""Run the chaos test with one seed on a fleet of its own: `python -m tests.chaos SEED MINUTES`.

After a failure, the folder of the run is kept, with the output of every process.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import structlog

from tests.chaos.machine import Chaos


def main(words: Sequence[str]) -> int:
    """Play a seed, and print the events with their times."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("minutes", type=float)
    parser.add_argument("--only", default="", metavar="PATTERN", help="faults with this in their name")
    options = parser.parse_args(words)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    structlog.configure(
        logger_factory=structlog.WriteLoggerFactory((folder / "output").open("w", buffering=1))
    )
    chaos = Chaos(folder, options.seed, options.only)
    try:
        with chaos:
            chaos.play(60 * options.minutes)
            chaos.prove()
    except BaseException:
        print(f"{folder} has the output of every process")
        raise
    print("\n".join(chaos.journal))
    print(dict(chaos.counts))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
