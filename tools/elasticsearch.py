# SPDX-License-Identifier: Apache-2.0
"""A real Elasticsearch node, private to the process that starts it.

    with Elasticsearch() as server:
        server.url          # "http://127.0.0.1:40213"

It uses the distribution of Elasticsearch's own integration tests, from Maven's central repository, with only
the modules that HTTP needs. A small program starts it, because Elasticsearch's own launcher refuses to run as
root.
"""

import hashlib
import urllib.error
import urllib.request
import zipfile
from pathlib import Path

from tools.companion import Companion
from tools.maven import artifacts, cached, program, run

VERSION = "8.19.3"

_ARTIFACT = f"org.elasticsearch.distribution.integ-test-zip:elasticsearch:{VERSION}:zip"
# The required parts: the server's own modules, and HTTP.
_PARTS = ("lib/", "modules/transport-netty4/")
JVM = ("-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1")
_NODE_PROGRAM = """
import java.nio.file.Path;
import java.util.Map;
import org.PRODUCT.common.logging.LogConfigurator;
import org.PRODUCT.common.settings.Settings;
import org.PRODUCT.env.Environment;
import org.PRODUCT.node.Node;
import org.PRODUCT.plugins.*;

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
        Environment environment = new Environment(settings, Path.of(words[1]));
        Node node = new Node(ARGUMENTS);
        node.start();
        Thread.currentThread().join();
    }
}
"""
_NODE_ARGUMENTS = """environment, PluginsLoader.createPluginsLoader(
            PluginsLoader.loadModulesBundles(environment.modulesDir()),
            PluginsLoader.loadPluginsBundles(environment.pluginsDir()),
            Map.of())"""


def install(product: str, version: str, artifact: str, node_arguments: str, plugin: str = "") -> Path:
    """Return a folder with a node's distribution and the program that starts the node. The folder is built if
    it is missing.

    `plugin` is the artifact of a plugin to install. Raises PartMissing.
    """
    name = f"{product}-{version}"
    main = _NODE_PROGRAM.replace("PRODUCT", product).replace("ARGUMENTS", node_arguments)
    program_digest = hashlib.sha256(main.encode()).hexdigest()[:12]

    def build(folder: Path) -> None:
        home = folder / "built" / "home"
        [archive] = artifacts(name, (artifact,)).glob("*.zip")
        with zipfile.ZipFile(archive) as opened:
            for path in opened.namelist():
                inside = path.partition("/")[2]
                if inside.startswith(_PARTS) and not path.endswith("/"):
                    (home / inside).parent.mkdir(parents=True, exist_ok=True)
                    (home / inside).write_bytes(opened.read(path))
        (home / "plugins").mkdir()
        if plugin:
            _, plugin_name, plugin_version, _ = plugin.split(":")
            [archive] = artifacts(f"{plugin_name}-{plugin_version}", (plugin,)).glob("*.zip")
            with zipfile.ZipFile(archive) as opened:
                opened.extractall(home / "plugins" / plugin_name)
        (folder / "Main.java").write_text(main)
        run([program("javac"), "-cp", f"{home}/lib/*", "-d", str(folder / "built"), "Main.java"], folder)

    return cached(f"{name}-{program_digest}", build)


class Elasticsearch(Companion):
    """The node."""

    NAME = "Elasticsearch"

    @property
    def url(self) -> str:
        """The node's URL, in the form of the sink's setting."""
        return f"http://127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        installed = install("elasticsearch", VERSION, _ARTIFACT, _NODE_ARGUMENTS)
        home = installed / "home"
        natives = sorted(str(path) for path in (home / "lib" / "platform").glob("linux-*"))
        options = [
            *JVM,
            f"-Des.path.home={home}",
            "-Djna.nosys=true",
            f"-Des.nativelibs.path={':'.join(natives)}",
            f"-Djava.io.tmpdir={folder}",
        ]
        modules = ["-p", str(home / "lib"), "--add-modules=ALL-MODULE-PATH", "--add-modules=jdk.net"]
        words = ["-cp", str(installed), "Main", str(home), str(folder), str(self.port)]
        return [program("java"), *options, *modules, *words]

    def answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/_cluster/health", timeout=1.0) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
