"""What a wheel of weft is called and what it says of itself, without building one."""

from __future__ import annotations

import importlib.util
import sysconfig
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]

pytest.importorskip("setuptools.command.bdist_wheel")


def loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("weft_setup", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_wheel_serves_every_python_of_a_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = loaded(ROOT / "setup.py")
    monkeypatch.chdir(ROOT)
    distribution = setup.BinaryDistribution({"name": "weft", "cmdclass": setup.COMMANDS})
    wheel = distribution.get_command_obj("bdist_wheel")
    wheel.ensure_finalized()
    python, abi, platform = wheel.get_tag()
    assert python == "py3"
    assert abi == "none"
    assert platform.startswith(sysconfig.get_platform().partition("-")[0])


def test_the_package_says_who_made_it_and_for_what() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["authors"] == [{"name": "the weft contributors"}]
    assert project["license"] == "Apache-2.0"
    assert "Typing :: Typed" in project["classifiers"]
    assert project["keywords"]


def test_no_page_for_those_who_change_weft_is_shipped() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]
    patterns = tool["setuptools"]["package-data"]["weft"]
    pages = set((ROOT / "weft").glob("*/README.md"))
    shipped = {path for pattern in patterns for path in (ROOT / "weft").glob(pattern)}
    assert pages
    assert pages & shipped == set()
