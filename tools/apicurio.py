# SPDX-License-Identifier: Apache-2.0
"""A real schema registry, Apicurio Registry in memory, private to the process that starts it.

with Apicurio() as registry:
    registry.url          # "http://127.0.0.1:40213/apis/ccompat/v7": Confluent's protocol
"""

import http.client
import tarfile
from pathlib import Path
from typing import ClassVar

from tools.companion import Companion
from tools.maven import cached, program, run

VERSION = "2.6.13.Final"
ANSWER_SECONDS_MAX = 10.0

_ARTIFACTS = (
    f"io.apicurio:apicurio-registry-app:{VERSION}:tar.gz:all",
    f"io.apicurio:apicurio-registry-utils-converter:{VERSION}",
)
_JVM = ("-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_PATH = "/apis/ccompat/v7"


def install() -> Path:
    """Return the folder of the registry, which is fetched if it is missing. Raises PartMissing.

    Its `lib` folder also contains Kafka Connect's Avro converter.
    """

    def build(folder: Path) -> None:
        program("java")
        for artifact in _ARTIFACTS:
            words = [program("mvn"), "--quiet", "--batch-mode", "dependency:copy", f"-Dartifact={artifact}"]
            run([*words, f"-DoutputDirectory={folder}"], folder)
        (distribution,) = folder.glob("*.tar.gz")
        with tarfile.open(distribution) as archive:
            archive.extractall(folder / "built", filter="data")
        (converter,) = folder.glob("*-converter-*.jar")
        converter.rename(folder / "built" / "lib" / converter.name)

    return cached(f"apicurio-{VERSION}", build)


class Apicurio(Companion):
    """The Apicurio registry. Its schemas are lost when it ends."""

    NAME = "Apicurio"
    START_SECONDS_MAX: ClassVar[float] = 300.0

    @property
    def url(self) -> str:
        """The base URL of the registry's Confluent-compatible API."""
        return f"http://127.0.0.1:{self.port}{_PATH}"

    def argv(self, folder: Path) -> list[str]:
        (runner,) = install().glob("*-runner.jar")
        settings = {"quarkus.http.host": "127.0.0.1", "quarkus.http.port": str(self.port)}
        options = [f"-D{name}={value}" for name, value in settings.items()]
        return [program("java"), *_JVM, *options, "-jar", str(runner)]

    def answers(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_SECONDS_MAX)
        try:
            connection.request("GET", f"{_PATH}/schemas/types")
            return connection.getresponse().status == http.client.OK
        except OSError:
            return False
        finally:
            connection.close()
