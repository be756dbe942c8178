# SPDX-License-Identifier: Apache-2.0
"""A server with MongoDB's protocol, private to the process that starts it.

It is mongo-java-server, because no package registry offers MongoDB's own server.

    with Mongo() as server:
        server.url          # "mongodb://127.0.0.1:40213"
"""

import hashlib
import socket
from pathlib import Path

from tools.companion import Companion
from tools.maven import artifacts, cached, program, run

VERSION = "1.47.0"

_ARTIFACTS = (f"de.bwaldvogel:mongo-java-server:{VERSION}", "org.slf4j:slf4j-nop:2.0.17")
_MAIN = """
import de.bwaldvogel.mongo.MongoServer;
import de.bwaldvogel.mongo.MongoVersion;
import de.bwaldvogel.mongo.backend.memory.MemoryBackend;
import java.util.List;

public class Main {
    // It calls itself older than the oldest server that drivers of today speak with.
    static class Version implements MongoVersion {
        public List<Integer> getVersionArray() { return List.of(4, 4, 0); }
        public int getWireVersion() { return 9; }
    }

    public static void main(String[] words) throws Exception {
        new MongoServer(new MemoryBackend().version(new Version()))
            .bind("127.0.0.1", Integer.parseInt(words[0]));
        Thread.currentThread().join();
    }
}
"""


def install() -> Path:
    """Return the folder of the server's program, built if missing. Raises PartMissing."""
    jars = artifacts(f"mongo-java-server-{VERSION}", _ARTIFACTS)

    def build(folder: Path) -> None:
        (folder / "Main.java").write_text(_MAIN)
        run([program("javac"), "-cp", f"{jars}/*", "-d", "built", "Main.java"], folder)

    return cached(f"mongo-java-server-{hashlib.sha256(_MAIN.encode()).hexdigest()[:12]}", build)


class Mongo(Companion):
    """The MongoDB server. It stores nothing on disk."""

    NAME = "Mongo"

    @property
    def url(self) -> str:
        """The server's URL, in the form of the sink's setting."""
        return f"mongodb://127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        classes = install()
        jars = artifacts(f"mongo-java-server-{VERSION}", _ARTIFACTS)
        options = ["-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [program("java"), *options, "-cp", f"{jars}/*:{classes}", "Main", str(self.port)]

    def answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1.0):
                return True
        except OSError:
            return False
