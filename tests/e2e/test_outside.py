"""docs/contribute/outside.md, followed: its module lies in a folder outside of the tree, and a
server uses all its parts."""

from __future__ import annotations

import json
import re
import shutil
import signal
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.server import HANG_S, Server, run_weft
from tests.pages import BLOCK, CONTRIBUTE, ROOT
from weft import LLM, SamplingParams
from weft.cli.main import main
from weft.config.engine import EngineConfig
from weft.config.families.table import add_outside
from weft.config.model import ModelError
from weft.config.options import Command, SettingsError
from weft.config.plugins import KINDS
from weft.executor.outside.passes import outside_passes
from weft.server.app import OPERATIONS
from weft.server.plugins import outside_operations
from weft.weights.known import BUNDLED

HERE = Path(__file__).parent
PAGE = CONTRIBUTE / "outside.md"
PLUGINS = ",".join(
    [
        "control=own_parts:ROWS",
        "routes=own_parts:HELLO",
        "passes=own_parts:StepCounter",
        "kv_groups=own_parts:row_counter",
        "families=own_parts:FAMILIES",
        "tiers=own_parts:Shelf",
    ]
)
NAMED = "control=rows,routes=hello,passes=step-counter,kv_groups=row-counter,tiers=shelf"
PROMPT = list(range(20, 220))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module of the page, and a model of its family."""
    folder = tmp_path_factory.mktemp("outside")
    [(_, name, text)] = BLOCK.findall(PAGE.read_text("utf-8"))
    # A fault that the test asks for by the length of a prompt.
    faulty = text.replace(
        "        StepCounter.num_steps += 1\n",
        "        StepCounter.num_steps += 1\n"
        "        if plan.num_tokens == 27:\n"
        "            raise RuntimeError('a fault of this pass')\n",
    )
    assert faulty != text
    (folder / name).write_text(faulty)
    (folder / "script.py").write_text("raise SystemExit(0)\n")
    shutil.copytree(BUNDLED, folder / "own-model")
    config = folder / "own-model" / "config.json"
    described = json.loads(config.read_text())
    described["architectures"] = ["OwnLlamaForCausalLM"]
    config.write_text(json.dumps(described))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
        server = Server(
            *("--model", str(folder / "own-model"), "--plugins", PLUGINS),
            *("--schedule-policy", "own_parts:ShortestName"),
            *("--logit-processors", f"{folder}/own_parts.py:Only"),
            *("--attention-backend", "own_parts:OneByOne"),
            *("--journal", str(folder / "journal")),
            # Such short chunks do not teach how fast prompts are computed, so a request waits for
            # what is stored, however slow that is.
            *("--chunked-prefill-size", "32", "--cache-wait-ms", str(int(1_000 * HANG_S))),
        )
        yield server
        assert server.stop(signal.SIGTERM) == 0
        journal = str(folder / "journal")
        assert run_weft("replay", journal)[0] == 0
        patch.setenv("PYTHONPATH", str(ROOT))
        returncode, errors = run_weft("replay", journal)
    assert (returncode, "Traceback" in errors) == (2, False)
    assert "there is no module 'own_parts'" in errors


def refused(server: Server, path: str, **body: object) -> tuple[int, str]:
    with pytest.raises(urllib.error.HTTPError) as caught:
        server.post(path, **body) if body else server.get(path)
    with caught.value as answer:
        return answer.code, answer.read().decode()


def generate(server: Server, **body: Any) -> dict[str, Any]:
    body.setdefault("input_ids", PROMPT[:3])
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
    told: dict[str, Any] = server.post("/generate", **body)
    return told


def ctl(server: Server, *words: str) -> int:
    """The status of `weft ctl` beside the module of the page, which `server` has made findable."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_PLUGINS", PLUGINS)
        return main(["ctl", *words, "--url", server.url, "--json"])


def test_parts_from_outside_work_over_http_and_weft_ctl(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    before = server.post("/rows", least=0)
    answer = generate(server)
    assert len(answer["output_ids"]) == 5
    after = server.post("/rows")
    assert after["rows_taken"] == before["rows_taken"] + 1, "the KV group"
    assert after["steps"] > before["steps"], "the pass"
    assert after["tokens"] == before["tokens"] + 5
    assert "step counter" in server.get("/server_info")["passes"]
    assert server.get("/own/hello?name=you") == {"hello": "you", "model": "own-model"}
    paths = server.get("/openapi.json")["paths"]
    assert {"/rows", "/own/hello"} <= set(paths)
    only = {"name": "Only", "params": {"token": 77}}
    said = generate(server, custom_logit_processor=[only])
    assert said["output_ids"] == [77] * 5, "the logit processor"
    assert server.get("/get_internal_state")["server_args"]["schedule_policy"] == (
        "own_parts:ShortestName"
    )
    assert ctl(server, "rows", "--least", "1") == 0
    printed = capsys.readouterr().out
    assert json.loads(printed)["tokens"] == after["tokens"] + 5
    assert printed.count("blocks") == 1
    by_name = server.post("/rpc", method="call_outside", params={"name": "own_parts:ROWS"})
    assert by_name["result"]["wrong"] == ""
    other = server.post("/rpc", method="call_outside", params={"name": "os:system"})
    assert "there is no 'os:system'; --plugins has own_parts:ROWS" in other["result"]["wrong"]


def test_the_attention_backend_computes_the_same_tokens(server: Server) -> None:
    before = server.post("/rows")["layers"]
    told = generate(server, input_ids=PROMPT[:70])
    assert server.post("/rows")["layers"] > before
    llm = LLM("weft-nano", attention_backend="torch", kv_tokens=512, threads=1)
    params = SamplingParams(max_new_tokens=5, temperature=0, ignore_eos=True)
    [plain] = llm.generate([PROMPT[:70]], params)
    assert told["output_ids"] == list(plain.token_ids)


def test_the_store_keeps_blocks_and_gives_them_back(server: Server) -> None:
    first = generate(server, input_ids=PROMPT)
    server.post("/cache/save")
    assert server.post("/rows")["blocks"] >= 3
    server.post("/flush_cache")
    again = generate(server, input_ids=PROMPT)
    assert again["output_ids"] == first["output_ids"]
    told = server.get("/cache")
    assert told["folder"] == "the shelf"
    assert told["disk"] == "open"
    assert told["faults"] == 0
    assert told["disk_hit_tokens"] >= 192
    server.post("/cache/clear")
    until_s = time.monotonic() + HANG_S
    while server.post("/rows")["blocks"]:  # a thread of the store removes them
        assert time.monotonic() < until_s
        time.sleep(0.01)


def test_a_package_gives_its_parts_names(folder: Path, tmp_path: Path) -> None:
    """The entry points of the page, as an installer writes them."""
    [described] = re.findall(r"^```toml pyproject.toml\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    points = tomllib.loads(described)["project"]["entry-points"]
    groups = {group.removeprefix("weft."): names for group, names in points.items()}
    assert groups.keys() >= {*KINDS, "attention_backends", "policies", "logit_processors"}
    shutil.copy(folder / "own_parts.py", tmp_path)
    installed = tmp_path / "own_parts-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    lines = []
    for group, names in points.items():
        lines.append(f"[{group}]")
        lines += [f"{name} = {value}" for name, value in names.items()]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
        server = Server(
            *("--model", str(folder / "own-model"), "--plugins", f"{NAMED},families=own-llama"),
            *("--schedule-policy", "shortest-name", "--attention-backend", "one-by-one"),
        )
        only = {"name": "only", "params": {"token": 77}}
        said = generate(server, custom_logit_processor=[only])
        counted = server.post("/rows")
        assert server.get("/own/hello?name=you")["hello"] == "you"
        assert server.stop(signal.SIGTERM) == 0
    assert said["output_ids"] == [77] * 5
    assert min(counted["rows_taken"], counted["steps"], counted["layers"]) > 0


def test_faults_of_parts_end_no_other_request(server: Server) -> None:
    answers: list[dict[str, Any]] = []
    with server.slowed(0.05):
        other = threading.Thread(target=lambda: answers.append(generate(server)))
        other.start()
        status, text = refused(server, "/rows", least=10**9)
        assert (status, "LookupError" in text) == (500, True)
        status, text = refused(server, "/rows", least=-1)
        assert (status, "least is -1; 0 or more is expected" in text) == (400, True)
        status, text = refused(server, "/rows", least="many")
        assert (status, "least" in text) == (400, True)
        assert refused(server, "/own/hello")[0] == 500
        assert ctl(server, "rows", "--least", "-1") == 1
        other.join(HANG_S)
    assert len(answers[0]["output_ids"]) == 5
    status, text = refused(
        server,
        "/generate",
        input_ids=[20] * 27,
        sampling_params={"max_new_tokens": 1},
    )
    assert status == 500
    assert len(generate(server)["output_ids"]) == 5, "the engine goes on"


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ("own_parts:ROWS", "'own_parts:ROWS' is not KIND=module:Name"),
        ("magic=own_parts:ROWS", "there is no kind 'magic'; the kinds are control"),
    ],
)
def test_a_setting_that_cannot_be_read_is_refused(plugins: str, why: str) -> None:
    with pytest.raises(SettingsError, match=why):
        Command("weft serve", "", EngineConfig).read(["--plugins", plugins], {})


def read_here(plugins: str) -> None:
    """What a start does with its plugins, in the front and in the engine."""
    outside_operations(plugins, OPERATIONS)
    outside_passes(plugins)
    add_outside(plugins)


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ("control=no_such:ROWS", "there is no module 'no_such'"),
        ("control=own_parts:NONE", "own_parts has no 'NONE'"),
        ("control=rows", "no installed package has it as an entry point of the group weft.control"),
        ("control=own_parts:HELLO", "is no weft.messages.outside.OutsideControl"),
        ("routes=own_parts:ROWS", "is no weft.server.operation.Operation"),
        ("passes=own_parts:RowCounter", "is no subclass of weft.executor.runner.Pass"),
        ("families=own_parts:ROWS", "is no dict of weft.config.families.family.Family"),
    ],
)
def test_a_part_that_cannot_be_used_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plugins: str, why: str
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(SettingsError, match=re.escape(why)):
        read_here(plugins)


# By what is said.
FAULTY_PARTS = {
    "makes no weft.scheduler.groups.protocol.KvGroup": {"plugins": "kv_groups=own_parts:ROWS"},
    "is no subclass of weft.tiers.outside.block_store.BlockStore": {
        "plugins": "tiers=own_parts:HELLO"
    },
    "one store from outside is possible": {
        "plugins": "tiers=own_parts:Shelf,tiers=own_parts:Shelf"
    },
    "SystemExit: always": {"plugins": "passes=faulty_parts:RaisingPass"},
    "cannot be made: SystemExit": {"plugins": "tiers=faulty_parts:UnmadeStore"},
    "available is 'anything'": {"plugins": "kv_groups=faulty_parts:text_group"},
    "longest is inf": {"plugins": "kv_groups=faulty_parts:endless_group"},
    "ArithmeticError: always": {"plugins": "kv_groups=faulty_parts:raising_group"},
    "is expected": {"attention_backend": "faulty_parts:NarrowAttention"},
    "it has no prepare, narrow, forward": {"attention_backend": "faulty_parts:NoAttention"},
    "it cannot be made: TypeError": {"attention_backend": "faulty_parts:plant"},
    "it is neither a backend of weft": {"attention_backend": "magic"},
}


@pytest.mark.parametrize("why", FAULTY_PARTS)
def test_parts_that_fail_at_once_end_the_start_with_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.syspath_prepend(str(HERE))
    with pytest.raises((ModelError, SettingsError), match=re.escape(why)) as refused:
        LLM("weft-nano", threads=1, kv_tokens=512, **FAULTY_PARTS[why])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("plugins", "why"),
    [
        ("control=script:ROWS", "control=script:ROWS: it could not be loaded: SystemExit: 0"),
        ("kv_groups=own_parts:ROWS", "makes no weft.scheduler.groups.protocol.KvGroup"),
    ],
    ids=["in the front", "in the engine"],
)
def test_a_server_with_such_a_part_says_why_it_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plugins: str, why: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    returncode, errors = run_weft("serve", "weft-nano", "--port", "0", "--plugins", plugins)
    assert returncode == 2
    assert why in errors.splitlines()[-1]
    assert "Traceback" not in errors
