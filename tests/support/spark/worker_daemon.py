# SPDX-License-Identifier: Apache-2.0
"""Spark's daemon of Python workers, which imports what workers need before it forks them.

Spark's own daemon imports nothing, so each worker spends most of a second of processor time on its imports,
and a session has dozens of workers. `pyspark.daemon` imports after the fork because threads do not survive
it. The modules below start two kinds of threads. The threads of jemalloc are restarted after a fork. OpenBLAS
starts no threads if `OPENBLAS_NUM_THREADS=1` is set.
"""

import gc
import importlib
import shlex
import sys
from pathlib import Path

from pyspark import daemon

MODULES = (
    "pandas",
    "pyspark.worker",
    "pyspark.sql.pandas.types",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.data_source_pushdown_filters",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "penstock.spark",
    "penstock.spark.driver",
    "penstock.spark.filters",
)
_PROGRAM = """\
#!/bin/sh
# $1 $2 $3: -m, a module, and for pyspark.daemon the module of its workers.
if [ "$2" = pyspark.daemon ]; then
    export OPENBLAS_NUM_THREADS=1 PYTHONPATH={root}"${{PYTHONPATH:+:$PYTHONPATH}}"
    exec {python} -m {module} "$3"
fi
exec {python} "$@"
"""


def write_python(folder: Path) -> Path:
    """Write a program for `PYSPARK_PYTHON` that runs this daemon instead of Spark's; return its path."""
    program = folder / "python"
    words = {"python": sys.executable, "root": str(Path(__file__).resolve().parents[3]), "module": __name__}
    program.write_text(_PROGRAM.format_map({name: shlex.quote(word) for name, word in words.items()}))
    program.chmod(0o755)
    return program


def main() -> None:
    """Import the modules and fork workers until Spark ends the daemon."""
    for module in MODULES:
        importlib.import_module(module)
    # The workers share these objects. The garbage collection after every task ignores them.
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
