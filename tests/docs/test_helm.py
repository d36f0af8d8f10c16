"""The Helm chart and the compose file: values as their schema, manifests as those of Kubernetes,
options as those of `weft serve`."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml  # type: ignore[import-untyped]

from tests.docs.helm_templates import render
from tests.docs.kubernetes_schemas import schema_of
from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.options import Command
from weft.config.server import ServerConfig
from weft.server.app import OPERATIONS
from weft.version import __version__

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm"
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text("utf-8"))
SERVE = Command("weft serve", "", EngineConfig, ServerConfig, Limits, positional="model")
OTHER: dict[str, Any] = {
    "model": "Qwen/Qwen3-0.6B",
    "arguments": ["--kv-dtype=int8", "--schedule-policy=priority > fair(key) > lpm"],
    "replicas": 3,
    "persistence": {"size": "1Ti", "accessMode": "ReadWriteMany", "storageClass": "shared"},
    "resources": {"cpu": "500m", "memory": "64Gi", "gpus": 1},
    "service": {"type": "LoadBalancer", "port": 443},
}


def manifests(changed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """What the chart makes of its values with those changed, by kind."""
    values = copy.deepcopy(VALUES) | changed
    jsonschema.validate(values, SCHEMA)
    data = {"Values": values, "Release": {"Name": "mine"}}
    made = {}
    for path in sorted((CHART / "templates").glob("*.yaml")):
        for one in yaml.safe_load_all(render(path.read_text("utf-8"), data)):
            made[one["kind"]] = one
    return made


@pytest.mark.parametrize("changed", [{}, OTHER], ids=["as they are", "others"])
def test_manifests_of_the_chart_are_as_their_schemas(changed: dict[str, Any]) -> None:
    made = manifests(changed)
    kinds = {"Deployment", "Service", "PersistentVolumeClaim", "PodDisruptionBudget"}
    assert made.keys() == kinds
    for manifest in made.values():
        jsonschema.validate(manifest, schema_of(manifest))


@pytest.mark.parametrize("changed", [{}, OTHER], ids=["as they are", "others"])
def test_the_chart_serves_drains_and_writes_as_the_server_does(changed: dict[str, Any]) -> None:
    made = manifests(changed)
    spec = made["Deployment"]["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    env = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    assert container["args"][:2] == ["weft", "serve"]
    settings = SERVE.read(container["args"][2:], env)
    server = settings.make(ServerConfig)
    assert server.port == container["ports"][0]["containerPort"]
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] > server.drain_s + waits_s
    assert settings.make(EngineConfig).model == changed.get("model", "")
    routes = {operation.path for operation in OPERATIONS}
    probes = [one for name, one in container.items() if name.endswith("Probe")]
    assert {probe["httpGet"]["path"] for probe in probes} <= routes
    assert len(probes) == 3
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for variable in ("WEFT_CACHE", "HF_HOME", "HOME"):
        assert any(env[variable].startswith(mount) for mount in mounts)
    claim = made["PersistentVolumeClaim"]["metadata"]["name"]
    assert {"claimName": claim} in [one.get("persistentVolumeClaim") for one in spec["volumes"]]
    labels = made["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert made["Service"]["spec"]["selector"].items() <= labels.items()
    assert made["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels.items()


@pytest.mark.parametrize(
    ("mode", "strategy"),
    [("ReadWriteOnce", "Recreate"), ("ReadWriteMany", "RollingUpdate")],
)
def test_a_new_pod_comes_first_where_two_machines_can_have_the_volume(
    mode: str, strategy: str
) -> None:
    volume = VALUES["persistence"] | {"accessMode": mode}
    made = manifests({"persistence": volume})
    assert made["Deployment"]["spec"]["strategy"]["type"] == strategy


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"modle": "x"}, "modle"),
        ({"replicas": "two"}, "two"),
        ({"arguments": ["kv-tokens=1"]}, "kv-tokens=1"),
        ({"service": {"type": "Ingress", "port": 80}}, "Ingress"),
    ],
)
def test_wrong_values_are_refused(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match=named):
        manifests(changed)


def test_every_value_is_used_and_described() -> None:
    templates = "\n".join(path.read_text("utf-8") for path in (CHART / "templates").glob("*.yaml"))
    used = set(re.findall(r"\.Values\.(\w+)", templates))
    assert used == VALUES.keys() == SCHEMA["properties"].keys() - {"global"}


def test_the_chart_has_the_version_of_weft() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


def test_what_a_template_names_must_be_there() -> None:
    for template in (
        "{{ .Values.none }}",
        "{{ upper .Values.a }}",
        "{{ if .Values.a }}",
        "{{ end }}",
    ):
        with pytest.raises(ValueError, match=r"is no|has no|there is no"):
            render(template, {"Values": {"a": "x"}})
    assert render(
        "a\n  {{- range .Values.a }}\n- {{ . | quote }}\n  {{- end }}\nb", {"Values": {"a": [1, 2]}}
    ) == ('a\n- "1"\n- "2"\nb')


def test_compose_builds_both_images_and_waits_longer_than_the_server_drains() -> None:
    for service in COMPOSE["services"].values():
        # WEFT_MODEL has no value: Compose takes it from the shell.
        fixed = {name: text for name, text in service["environment"].items() if text}
        read = {name: text for name, text in fixed.items() if "$" not in text}
        drain_s = SERVE.read([], read).make(ServerConfig).drain_s
        assert int(service["stop_grace_period"].removesuffix("s")) > drain_s
        assert (ROOT / "deploy" / "compose" / service["build"]["context"] / "Dockerfile").is_file()
    variants = [one["build"]["args"]["VARIANT"] for one in COMPOSE["services"].values()]
    assert variants == ["cpu", "gpu"]
    devices = COMPOSE["services"]["weft-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices[0]["capabilities"] == ["gpu"]
    image = (ROOT / "Dockerfile").read_text("utf-8")
    assert "install -d -o weft -g weft /cache" in image
