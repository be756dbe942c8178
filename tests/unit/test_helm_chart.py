# SPDX-License-Identifier: Apache-2.0
"""The Helm chart: its values are checked against the daemon's settings, and its objects against the schemas
of Kubernetes.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.settings.daemon import load_settings
from tests.support.suite.fixture_types import MissingPart
from tools.helm import render
from tools.servers import PartMissing

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
CHART = DEPLOY / "helm"
KUBERNETES = "1.34"
INSTANCES = ("--set", "settings.instances.shop.source=mysql://repl@db1")


def values() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    return read


def template(name: str) -> str:
    return (CHART / "templates" / f"{name}.yaml").read_text()


def test_default_settings_are_those_of_a_daemon(tmp_path: Path) -> None:
    settings = values()["settings"]
    settings["instances"] = {"shop": {"source": "mysql://repl@db1"}}
    # The chart mounts the secret at this path.
    token = tmp_path / "token"
    token.write_text("secret")
    assert settings["listen"]["token_file"] == "/run/secrets/penstock/token"
    settings["listen"]["token_file"] = str(token)
    path = tmp_path / "penstock.yaml"
    path.write_text(yaml.safe_dump(settings))
    assert load_settings(path).listen.http == "0.0.0.0:7070"


def test_folders_and_user_are_those_of_the_image() -> None:
    dockerfile, stateful_set = (DEPLOY / "Dockerfile").read_text(), template("statefulset")
    assert "USER 10001:10001" in dockerfile
    assert set(re.findall(r"(?:runAsUser|runAsGroup|fsGroup): (\d+)", stateful_set)) == {"10001"}
    assert f"mountPath: {values()['settings']['log']['folder']}" in stateful_set
    assert "args: [serve, /etc/penstock/penstock.yaml]" in stateful_set


def test_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = re.search(r'^version = "(.*)"', (DEPLOY.parent / "Cargo.toml").read_text(), re.MULTILINE)
    assert version is not None
    assert chart["appVersion"] == version[1]


def rendered(missing_part: MissingPart, *words: str) -> list[dict[str, Any]]:
    """Return the objects that Helm renders."""
    try:
        done = render(CHART, *words)
    except PartMissing as problem:
        missing_part("Helm", str(problem))
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


CASES: dict[str, tuple[str, ...]] = {
    "defaults": (),
    "fleet over TLS": (
        "--set=replicas=3",
        "--set=settings.coordination=zookeeper://zk1:2181/penstock",
        "--set=settings.fleet.address=${POD_NAME}.shop-members:7070",
        "--set=settings.listen.canal=0.0.0.0:11111",
        "--set=settings.listen.ptubes_monitor=0.0.0.0:23333",
        "--set=settings.listen.tls.cert=/run/secrets/penstock/cert",
        "--set=storage.className=fast",
        '--set-json=tolerations=[{"operator": "Exists"}]',
    ),
    "without a secret": ("--set=secret=null", '--set-json=env=[{"name": "TOKEN", "value": "x"}]'),
}


@pytest.mark.deep(guard="tests/unit/test_helm_chart.py::test_default_settings_are_those_of_a_daemon")
@pytest.mark.parametrize("words", CASES.values(), ids=CASES)
def test_rendered_objects_are_valid_in_kubernetes(missing_part: MissingPart, words: tuple[str, ...]) -> None:
    try:
        import kubernetes_validate
    except ImportError as problem:
        missing_part("the schemas of Kubernetes", f"{problem}: pip install kubernetes-validate")
    objects = rendered(missing_part, *INSTANCES, *words)
    assert [(item["kind"], item["metadata"]["name"]) for item in objects] == [
        ("ConfigMap", "shop"),
        ("Service", "shop"),
        ("Service", "shop-members"),
        ("StatefulSet", "shop"),
    ]
    for item in objects:
        kubernetes_validate.validate(item, KUBERNETES, strict=True)


@pytest.mark.deep(guard="tests/unit/test_helm_chart.py::test_default_settings_are_those_of_a_daemon")
def test_pod_has_no_privileges_and_its_probes_reach_the_daemon(missing_part: MissingPart) -> None:
    *_, stateful_set = rendered(missing_part, *INSTANCES, *CASES["fleet over TLS"])
    pod = stateful_set["spec"]["template"]["spec"]
    [container] = pod["containers"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "liveness", "readiness")}
    assert {(probe["port"], probe["scheme"]) for probe in probes.values()} == {("http", "HTTPS")}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 7070, "canal": 11111, "ptubes-monitor": 23333}
    [claim] = stateful_set["spec"]["volumeClaimTemplates"]
    assert (claim["spec"]["storageClassName"], claim["spec"]["accessModes"]) == ("fast", ["ReadWriteOnce"])
    assert {"name": "log", "mountPath": "/var/lib/penstock"} in container["volumeMounts"]


@pytest.mark.deep(guard="tests/unit/test_helm_chart.py::test_default_settings_are_those_of_a_daemon")
def test_settings_of_the_config_map_start_a_daemon(missing_part: MissingPart, tmp_path: Path) -> None:
    config_map, *_ = rendered(missing_part, *INSTANCES)
    (tmp_path / "token").write_text("secret")
    text = config_map["data"]["penstock.yaml"].replace("/run/secrets/penstock", str(tmp_path))
    path = tmp_path / "penstock.yaml"
    path.write_text(text)
    assert set(load_settings(path).instances) == {"shop"}


@pytest.mark.deep(guard="tests/unit/test_helm_chart.py::test_default_settings_are_those_of_a_daemon")
def test_monitor_selects_one_of_the_two_services(missing_part: MissingPart) -> None:
    objects = rendered(missing_part, *INSTANCES, "--set=serviceMonitor.enabled=true")
    [monitor] = [item for item in objects if item["kind"] == "ServiceMonitor"]
    services = [item for item in objects if item["kind"] == "Service"]
    [expression] = monitor["spec"]["selector"]["matchExpressions"]
    selected = [item for item in services if expression["key"] in item["metadata"]["labels"]]
    assert [item["metadata"]["name"] for item in selected] == ["shop-members"]


@pytest.mark.deep(guard="tests/unit/test_helm_chart.py::test_default_settings_are_those_of_a_daemon")
@pytest.mark.parametrize(
    ("words", "message"),
    [((), "name at least one instance"), ((*INSTANCES, "--set=replicas=2"), "several daemons need")],
)
def test_values_that_cannot_run_are_refused(
    missing_part: MissingPart, words: tuple[str, ...], message: str
) -> None:
    try:
        done = render(CHART, *words)
    except PartMissing as problem:
        missing_part("Helm", str(problem))
    assert done.returncode != 0
    assert message in done.stderr
