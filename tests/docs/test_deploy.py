"""What stands under deploy/ and beside it names options, files and routes that exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.docs.kubernetes_schemas import schema_of
from weft.config.engine import EngineConfig
from weft.config.kv_events import parse_kv_events
from weft.config.limits import Limits
from weft.config.nodes import check_nodes
from weft.config.options import Command
from weft.config.server import ServerConfig
from weft.launch.node_health import PATHS
from weft.observe.metrics import Metrics
from weft.server.app import OPERATIONS

ROOT = Path(__file__).parents[2]
SERVE = Command("weft serve", "", EngineConfig, ServerConfig, Limits, positional="model")


KUBERNETES = ROOT / "deploy" / "kubernetes"
MANIFESTS = sorted(path.stem for path in KUBERNETES.glob("*.yaml") if path.stem != "kustomization")


def manifests(name: str) -> list[dict[str, Any]]:
    text = (KUBERNETES / f"{name}.yaml").read_text("utf-8")
    return [one for one in yaml.safe_load_all(text) if isinstance(one, dict)]


def test_systemd_example_has_keys_that_are_options() -> None:
    path = ROOT / "deploy" / "systemd" / "weft.toml"
    settings = SERVE.read(["--config", str(path)], {})
    assert settings.make(ServerConfig).log_format == "json"
    assert tomllib.loads(path.read_text("utf-8"))["drain_s"] == 30.0


def test_systemd_unit_waits_longer_than_the_server_drains() -> None:
    unit = (ROOT / "deploy" / "systemd" / "weft.service").read_text("utf-8")
    (timeout,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(timeout) > ServerConfig().drain_s
    (told,) = re.findall(r"--drain-s seconds \((\d+) by default\)", unit)
    assert int(told) == ServerConfig().drain_s


def test_kubernetes_manifests_use_options_and_routes_of_the_server() -> None:
    deployment, claim, budget, service = manifests("weft")
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["args"][:2] == ["weft", "serve"]
    read = SERVE.read(container["args"][2:], {})
    settings = read.make(ServerConfig)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert settings.port == ports["http"]
    events = parse_kv_events(read.make(EngineConfig).kv_events_config)
    assert events.address == f"tcp://*:{ports['kv-events']}"
    assert events.replay_endpoint == f"tcp://*:{ports['kv-replay']}"
    waits_s = int(container["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert spec["terminationGracePeriodSeconds"] > settings.drain_s + waits_s
    routes = {operation.path for operation in OPERATIONS}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes
    assert service["spec"]["ports"][0]["targetPort"] == "http"
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    claims = [volume.get("persistentVolumeClaim") for volume in spec["volumes"]]
    assert {"claimName": claim["metadata"]["name"]} in claims


@pytest.mark.parametrize("name", ["weft", "nodes"])
def test_pods_with_a_read_only_system_write_into_their_volumes(name: str) -> None:
    for container in containers(manifests(name)):
        if not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            continue
        mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
        variables = {one["name"]: one.get("value", "") for one in container["env"]}
        for variable in ("WEFT_CACHE", "HF_HOME", "HOME"):
            assert any(variables[variable].startswith(mount) for mount in mounts), variable
        assert "/tmp" in mounts


def containers(part: Any) -> Iterator[dict[str, Any]]:
    """All containers of a manifest."""
    if isinstance(part, dict):
        yield from part.get("containers", [])
        part = [*part.values()]
    if isinstance(part, list):
        for one in part:
            yield from containers(one)


def expanded(args: list[str], told: dict[str, str]) -> list[str]:
    """The arguments of a container, as Kubernetes puts its variables in."""
    return [re.sub(r"\$\((\w+)\)", lambda found: told[found[1]], arg) for arg in args]


def test_the_nodes_of_one_model_are_told_the_same_and_find_each_other() -> None:
    unit, service, policy = manifests("nodes")
    template = unit["spec"]["leaderWorkerTemplate"]
    told = {"LWS_GROUP_SIZE": str(template["size"]), "LWS_LEADER_ADDRESS": "weft-nodes-0.weft"}
    found = []
    for part, rank in ("leaderTemplate", "0"), ("workerTemplate", "1"):
        pod = template[part]
        (container,) = pod["spec"]["containers"]
        args = expanded(container["args"], told | {"LWS_WORKER_INDEX": rank})
        assert args[:2] == ["weft", "serve"]
        env = {one["name"]: "x" for one in container["env"] if one["name"] == "WEFT_DIST_SECRET"}
        settings = SERVE.read(args[2:], env)
        config = settings.make(EngineConfig)
        check_nodes(config)
        assert settings.make(ServerConfig).port == container["ports"][0]["containerPort"]
        answered = {operation.path for operation in OPERATIONS} if rank == "0" else set(PATHS)
        probes = [probe for name, probe in container.items() if name.endswith("Probe")]
        assert len(probes) >= 2
        assert {probe["httpGet"]["path"] for probe in probes} <= answered
        assert config.node_rank == int(rank)
        assert (
            pod["metadata"]["labels"].items()
            >= policy["spec"]["podSelector"]["matchLabels"].items()
        )
        found.append(replace(config, node_rank=0))
    assert found[0] == found[1]
    assert service["spec"]["selector"]["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


@pytest.mark.parametrize("name", MANIFESTS)
def test_kubernetes_manifests_are_as_their_schemas(name: str) -> None:
    for manifest in manifests(name):
        jsonschema.validate(manifest, schema_of(manifest))


def test_a_manifest_with_a_typing_error_is_found() -> None:
    deployment = manifests("weft")[0]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    container["livenesProbe"] = container.pop("livenessProbe")
    with pytest.raises(jsonschema.ValidationError, match="livenesProbe"):
        jsonschema.validate(deployment, schema_of(deployment))


def test_kubernetes_manifests_fit_together() -> None:
    deployment = manifests("weft")[0]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["containerPort"] for port in container["ports"]}
    pool, route = manifests("pool")
    (monitor,) = manifests("monitor")
    (policy,) = manifests("events")
    (scaler,) = manifests("scale")
    for chosen in (pool["spec"]["selector"], monitor["spec"]["selector"]):
        assert chosen["matchLabels"].items() <= labels.items()
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= labels.items()
    opened = {port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]}
    assert opened == ports
    assert {port["number"] for port in pool["spec"]["targetPorts"]} <= ports
    (backend,) = route["spec"]["rules"][0]["backendRefs"]
    assert backend["name"] == pool["metadata"]["name"]
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    kustomized = (KUBERNETES / "kustomization.yaml").read_text("utf-8")
    listed = re.findall(r"^  (?:# )?- ([\w-]+)\.yaml", kustomized, re.MULTILINE)
    assert sorted(listed) == MANIFESTS


def test_pods_get_no_variables_of_services_that_look_like_settings() -> None:
    deployment = manifests("weft")[0]
    group = manifests("nodes")[0]["spec"]["leaderWorkerTemplate"]
    pods = [deployment["spec"]["template"], group["leaderTemplate"], group["workerTemplate"]]
    assert [pod["spec"]["enableServiceLinks"] for pod in pods] == [False] * 3


def test_the_metrics_that_manifests_and_endpoint_pickers_read_are_there() -> None:
    page = Metrics("m", "vllm").render().decode()
    (scaler,) = manifests("scale")
    (scaled,) = [metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]]
    assert f"\n{scaled.replace('weft_', 'weft:', 1)}{{" in page
    for name in (
        "vllm:num_requests_waiting",
        "vllm:num_requests_running",
        "vllm:kv_cache_usage_perc",
    ):
        assert f"\n{name}{{" in page


@pytest.mark.parametrize(
    ("name", "tests"), [("ci", "scripts/test"), ("nightly", "scripts/test --all")]
)
def test_workflows_call_what_is_there(name: str, tests: str) -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"] for step in steps if "run" in step]
    assert tests in commands
    assert all((ROOT / command.split()[0]).exists() for command in commands)


def test_hooks_are_those_of_the_checks() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert {hook["id"] for hook in hooks["repos"][0]["hooks"]} >= {"ruff", "ruff-format", "mypy"}


def test_a_release_is_tried_with_every_python_that_is_named_and_signed() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8"))
    job = workflow["jobs"]["release"]
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    pythons = re.findall(r"Python :: (3\.\d+)", text)
    [versions] = [
        step["with"]["python-version"]
        for step in job["steps"]
        if "python" in str(step) and "with" in step
    ]
    assert sorted(versions.split()) == pythons
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert f"scripts/release {' '.join(f'python{one}' for one in pythons)}" in runs
    [signed] = [step["with"]["subject-path"] for step in job["steps"] if "attest" in str(step)]
    assert set(signed.split()) <= set(runs[-1].split())  # what is signed is what is published
    assert "dist/SHA256SUMS" in signed
    assert job["permissions"]["id-token"] == job["permissions"]["attestations"] == "write"
    assert "secrets." not in str(workflow)


def test_image_copies_files_that_are_there() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if re.match(r"COPY (?!--)", line)]
    for names in copied:
        assert all((ROOT / name).exists() for name in names)
