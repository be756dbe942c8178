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
_MAIN = """
import java.nio.file.Path;
import org.opensearch.common.logging.LogConfigurator;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.node.Node;

public class Main {
    public static void main(String[] words) throws Exception {
        Settings settings = Settings.builder()
            .put("path.home", words[0])
            .put("path.data", words[1] + "/data")
            .put("path.logs", words[1] + "/logs")
            .put("http.port", words[2])
            .put("transport.port", "0")
            .put("network.host", "127.0.0.1")
            .put("discovery.type", "single-node")
            .put("node.name", "test")
            .put("node.processors", 2)
            .put("cluster.routing.allocation.disk.threshold_enabled", false)
            .build();
        LogConfigurator.registerErrorListener();
        LogConfigurator.configureWithoutConfig(Settings.builder().put("logger.level", "WARN").build());
        Node node = new Node(new Environment(settings, Path.of(words[1])));
        node.start();
        Thread.currentThread().join();
    }
}
"""


class OpenSearch(Elasticsearch):
    """The node."""

    NAME = "OpenSearch"

    def argv(self, folder: Path) -> list[str]:
        installed = install(f"opensearch-{VERSION}", _ARTIFACT, _MAIN)
        home = installed / "home"
        options = [*JVM, f"-Dopensearch.path.home={home}", "-Djna.nosys=true", f"-Djava.io.tmpdir={folder}"]
        words = ["-cp", f"{home}/lib/*:{installed}", "Main", str(home), str(folder), str(self.port)]
        return [program("java"), *options, *words]
