# SPDX-License-Identifier: Apache-2.0
"""A real OpenSearch node, private to the process that starts it.

    with OpenSearch() as server:
        server.url          # "http://127.0.0.1:40213"

It uses the distribution of OpenSearch's own integration tests, from Maven's central repository.
"""

from pathlib import Path

from tools.elasticsearch import JVM, Elasticsearch, install
from tools.maven import program

VERSION = "2.19.6"

_ARTIFACT = f"org.opensearch.distribution.integ-test-zip:opensearch:{VERSION}:zip"


class OpenSearch(Elasticsearch):
    """The node."""

    NAME = "OpenSearch"

    def argv(self, folder: Path) -> list[str]:
        installed = install("opensearch", VERSION, _ARTIFACT, "environment")
        home = installed / "home"
        options = [*JVM, f"-Dopensearch.path.home={home}", "-Djna.nosys=true", f"-Djava.io.tmpdir={folder}"]
        words = ["-cp", f"{home}/lib/*:{installed}", "Main", str(home), str(folder), str(self.port)]
        return [program("java"), *options, *words]
