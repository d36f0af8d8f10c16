"""The README's examples, run as they stand there (on another port)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import SMALL, Server

README = (Path(__file__).parents[2] / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.stop() == 0


def test_the_curl_example_answers(server: Server) -> None:
    (example,) = blocks("bash")
    command = example.replace("http://127.0.0.1:30000", server.url)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=240)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("example", blocks("python"), ids=["openai", "offline"])
def test_the_python_examples_print_something(server: Server, example: str) -> None:
    code = example.replace("http://127.0.0.1:30000", server.url)
    code = code.replace("LLM()", f"LLM(kv_tokens={SMALL[1]}, threads=1)")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
