# SPDX-License-Identifier: Apache-2.0
"""Fetch and compile the jars of the example into the folder that is named, and print their paths."""

import sys
from pathlib import Path

from examples.auto_cdc.lake import jars

if len(sys.argv) != 2:
    sys.exit("usage: python -m examples.auto_cdc.lake FOLDER")
print(",".join(map(str, jars(Path(sys.argv[1])))))
