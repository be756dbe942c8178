# SPDX-License-Identifier: Apache-2.0
"""A real OpenSearch node, private to the process that starts it.

    with OpenSearch() as server:
        server.url          # "http://127.0.0.1:40213"

It uses the distribution of OpenSearch's own integration tests, from Maven's central repository.
"""

import base64
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import ClassVar

from tools.elasticsearch import JVM, Elasticsearch, install
from tools.maven import program

VERSION = "2.19.6"
# The newest version whose security plugin is in Maven's central repository.
SECURED_VERSION = "2.19.4"

_ARTIFACT = "org.opensearch.distribution.integ-test-zip:opensearch:{}:zip"
_PLUGIN = f"org.opensearch.plugin:opensearch-security:{SECURED_VERSION}.0:zip"
_SECURED_ARGUMENTS = """new Environment(Settings.builder().put(settings)
            .loadFromPath(Path.of(words[1], "settings.yml")).build(), Path.of(words[1]))"""
_FILES = {"pemcert": "server.pem", "pemkey": "server-key.pem", "pemtrustedcas": "authority.pem"}
_SECURED_SETTINGS = "".join(
    [
        "plugins.security.ssl.http.enabled: true\n",
        "plugins.security.ssl.transport.enforce_hostname_verification: false\n",
        "plugins.security.allow_default_init_securityindex: true\n",
        "plugins.security.audit.type: noop\n",
        *(
            f"plugins.security.ssl.{layer}.{name}_filepath: {file}\n"
            for layer in ("http", "transport")
            for name, file in _FILES.items()
        ),
    ]
)
# The account `loader` has the action groups that the guide of the sink lists; the account `reader` may only
# read.
_ACCOUNTS = {
    "internal_users.yml": """
_meta: {type: internalusers, config_version: 2}
loader: {hash: HASH}
reader: {hash: HASH}
""",
    "roles.yml": """
_meta: {type: roles, config_version: 2}
loader:
  cluster_permissions: [cluster_monitor, cluster_composite_ops, "indices:data/read/scroll/clear"]
  index_permissions: [{index_patterns: ["shop.*", "killed.*"], allowed_actions: [indices_all]}]
reader:
  cluster_permissions: [cluster_monitor, cluster_composite_ops]
  index_permissions: [{index_patterns: ["shop.*"], allowed_actions: [read]}]
""",
    "roles_mapping.yml": """
_meta: {type: rolesmapping, config_version: 2}
loader: {users: [loader]}
reader: {users: [reader]}
""",
}


class OpenSearch(Elasticsearch):
    """The node."""

    NAME = "OpenSearch"

    def argv(self, folder: Path) -> list[str]:
        home = self._install() / "home"
        options = [*JVM, f"-Dopensearch.path.home={home}", "-Djna.nosys=true", f"-Djava.io.tmpdir={folder}"]
        classes = f"{home}/lib/*:{home.parent}"
        return [program("java"), *options, "-cp", classes, "Main", str(home), str(folder), str(self.port)]

    def _install(self) -> Path:
        return install("opensearch", VERSION, _ARTIFACT.format(VERSION), "environment")


class SecuredOpenSearch(OpenSearch):
    """An OpenSearch node with its security plugin: accounts, and TLS with a folder of
    `tools.servers.certificate`.
    """

    PASSWORD: ClassVar[str] = "open-word"
    _HASH: ClassVar[str] = "$2b$05$abcdefghijklmnopqrstuuXS11LG0OWvg42xGgIfQtNhdLw7fQ/Gu"

    def __init__(self, tls: Path) -> None:
        super().__init__()
        self._tls = tls

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def argv(self, folder: Path) -> list[str]:
        argv = super().argv(folder)
        (folder / "settings.yml").write_text(_SECURED_SETTINGS)
        for file in _FILES.values():
            shutil.copy(self._tls / file, folder / file)
        plugin = self._install() / "home" / "plugins" / "opensearch-security"
        accounts = folder / "opensearch-security"
        shutil.copytree(plugin / "config", accounts, dirs_exist_ok=True)
        for name, content in _ACCOUNTS.items():
            (accounts / name).write_text(content.replace("HASH", self._HASH))
        return argv

    def answers(self) -> bool:
        # The node answers before the plugin knows its accounts.
        account = base64.b64encode(f"loader:{self.PASSWORD}".encode()).decode()
        health = urllib.request.Request(
            f"{self.url}/_cluster/health", headers={"Authorization": f"Basic {account}"}
        )
        context = ssl.create_default_context(cafile=self._tls / "authority.pem")
        try:
            with urllib.request.urlopen(health, timeout=1.0, context=context) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _install(self) -> Path:
        artifact = _ARTIFACT.format(SECURED_VERSION)
        return install("opensearch", SECURED_VERSION, artifact, _SECURED_ARGUMENTS, _PLUGIN)
