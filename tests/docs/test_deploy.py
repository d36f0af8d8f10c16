"""What stands under deploy/ and beside it names options, files and routes that exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from weft.config.engine import EngineConfig
from weft.config.limits import Limits
from weft.config.options import Command
from weft.config.server import ServerConfig
from weft.server.app import OPERATIONS

ROOT = Path(__file__).parents[2]
SERVE = Command("weft serve", "", EngineConfig, ServerConfig, Limits, positional="model")


def manifests() -> list[dict[str, object]]:
    text = (ROOT / "deploy" / "kubernetes" / "weft.yaml").read_text("utf-8")
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


def test_kubernetes_manifests_use_options_and_routes_of_the_server() -> None:
    deployment, service = manifests()
    assert (deployment["kind"], service["kind"]) == ("Deployment", "Service")
    spec = deployment["spec"]["template"]["spec"]  # type: ignore[index]
    (container,) = spec["containers"]
    assert container["args"][:2] == ["weft", "serve"]
    settings = SERVE.read(container["args"][2:], {}).make(ServerConfig)
    assert settings.port == container["ports"][0]["containerPort"]
    assert spec["terminationGracePeriodSeconds"] > settings.drain_s
    routes = {operation.path for operation in OPERATIONS}
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] in routes


def test_workflow_and_hooks_call_what_is_there() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    commands = [step["run"].split()[0] for step in steps if "run" in step]
    assert "scripts/test" in commands
    assert all((ROOT / command).exists() for command in commands)
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))
    assert {hook["id"] for hook in hooks["repos"][0]["hooks"]} >= {"ruff", "ruff-format", "mypy"}


def test_image_copies_files_that_are_there() -> None:
    text = (ROOT / "Dockerfile").read_text("utf-8")
    copied = [line.split()[1:-1] for line in text.splitlines() if re.match(r"COPY (?!--)", line)]
    for names in copied:
        assert all((ROOT / name).exists() for name in names)
