# SPDX-License-Identifier: Apache-2.0
"""Helm, compiled from its Go module."""

import os
import subprocess
from pathlib import Path

from tools.maven import cached, program, run

VERSION = "v3.22.0"
# A Helm that `go install` compiled assumes a Kubernetes 1.20 cluster unless a version is passed.
_KUBERNETES = "1.32.0"
_RENDER_SECONDS_MAX = 60.0


def install() -> Path:
    """Return Helm's program. Compiles it if it is missing, which takes minutes. Raises PartMissing."""

    def build(folder: Path) -> None:
        go = program("go", "/usr/local/go/bin")
        (folder / "built").mkdir()
        words = ["env", f"GOBIN={folder / 'built'}", go, "install", f"helm.sh/helm/v3/cmd/helm@{VERSION}"]
        run(words, folder)

    return cached(f"helm-{VERSION}", build) / "helm"


def render(chart: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Return the result of `helm template` for a release `shop`. Raises PartMissing."""
    helm = install()
    return subprocess.run(
        [helm, "template", "shop", str(chart), "--kube-version", _KUBERNETES, *words],
        env={"PATH": os.environ.get("PATH", os.defpath), "HOME": str(helm.parent)},
        capture_output=True,
        text=True,
        timeout=_RENDER_SECONDS_MAX,
    )
