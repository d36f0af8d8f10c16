"""The examples of the README and of the first five minutes, run as they stand there (on another
port)."""

from __future__ import annotations

import gc
import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.server import SMALL, Server

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "docs" / "start" / "five-minutes.md"]


def blocks(language: str) -> list[str]:
    text = "\n".join(page.read_text("utf-8") for page in PAGES)
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    assert server.stop() == 0


@pytest.mark.parametrize("example", blocks("bash"), ids=["readme", "five-minutes"])
def test_the_curl_examples_answer(server: Server, example: str) -> None:
    command = example.replace("http://127.0.0.1:30000", server.url)
    answer = subprocess.run(["bash", "-c", command], capture_output=True, check=True, timeout=240)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")  # of clients that live to the end
@pytest.mark.parametrize("example", blocks("python"), ids=["openai", "offline"])
def test_the_python_examples_print_something(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], example: str
) -> None:
    code = example.replace("http://127.0.0.1:30000", server.url)
    code = code.replace("LLM()", f"LLM(kv_tokens={SMALL[1]}, threads=1)")
    path = tmp_path / "example.py"
    path.write_text(code, "utf-8")
    runpy.run_path(str(path))
    gc.collect()
    assert capsys.readouterr().out.strip()
