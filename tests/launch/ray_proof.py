"""What weft in Ray Serve promises: tokens a second beside a server without Ray, the end of an
engine, one replica that becomes two and one again under load, sessions, and a model on two
machines. Needs `pip install "ray[serve]"`.

    python -m tests.launch.ray_proof [speed] [kill] [scale] [nodes] [--model FOLDER]

`--model` is for `speed`, whose figures depend on it: a proxy of Ray's takes as long for a token of
a small model as for one of a large one. It is no test, because it takes minutes. Prints one line
for each claim; the status is 1 if one does not hold. Machines of Ray's are processes of this one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import sys
import time
from collections.abc import Iterator, Sequence

import httpx
import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.e2e.server import Server
from tests.launch.nodes_proof import Proof
from tests.launch.ray_engines import engines
from tests.nano_adapters import NANO
from weft.launch.ray import build

PORT = 31321
URL = f"http://127.0.0.1:{PORT}"
SMALL = {"kv_tokens": "20000", "threads": "1", "device": "cpu"}
STREAMS = 16
OUTPUT_LEN = 64
ROUNDS = 5
LEAST_SHARE = 0.8  # of the tokens a second without Ray
KILL_BAR_S = 15.0
HANG_S = 240.0
LOOK_S = 0.2


async def complete(client: httpx.AsyncClient, text: str, num: int) -> httpx.Response:
    body = {"prompt": text, "max_tokens": num, "temperature": 0, "ignore_eos": True}
    return await client.post("/v1/completions", json=body)


async def read_stream(client: httpx.AsyncClient, text: str) -> int:
    """How many pieces have come."""
    body = {"prompt": text, "max_tokens": OUTPUT_LEN, "ignore_eos": True, "stream": True}
    num = 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            num += line.startswith("data: {")
    return num


async def tokens_per_s(url: str, number: int) -> float:
    """Of streams that begin at once."""
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S) as client:
        began_s = time.perf_counter()
        texts = [f"# {number} {index}\nimport os\n" for index in range(STREAMS)]
        await asyncio.gather(*(read_stream(client, text) for text in texts))
        return STREAMS * OUTPUT_LEN / (time.perf_counter() - began_s)


@contextlib.contextmanager
def deployed(**args: str) -> Iterator[None]:
    serve.run(build({"model": str(NANO)} | SMALL | args), name="weft", route_prefix="/")
    try:
        yield
    finally:
        serve.delete("weft")


def prove_speed(proof: Proof, model: str = str(NANO)) -> None:
    """In turns with a server that has as many threads."""
    options = [
        word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", value)
    ]
    direct = Server(model, small=options)
    memory = memory_of(psutil.Process(direct.process.pid))
    with deployed(num_cpus="1", model=model):
        ratios = []
        for number in range(ROUNDS + 1):
            through = asyncio.run(tokens_per_s(URL, number))
            without = asyncio.run(tokens_per_s(direct.url, number))
            if number:
                ratios.append(through / without)
                print(f"     {through:.0f} tokens/s with Ray, {without:.0f} without", flush=True)
        (engine,) = engines()
        replica = next(one for one in engine.parents() if "Replica" in " ".join(one.cmdline()))
        share = memory_of(replica) / memory
    direct.stop()
    median = statistics.median(ratios)
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    proof.claim(
        median >= LEAST_SHARE, f"{median:.2f} ({spread}) of the tokens a second without Ray"
    )
    print(f"     memory of a replica: {share:.2f} times that of weft serve", flush=True)


def memory_of(process: psutil.Process) -> int:
    """Bytes that it and what it has started have for themselves."""
    return sum(one.memory_full_info().uss for one in (process, *process.children(recursive=True)))


def prove_kill(proof: Proof) -> None:
    """One of two engines is killed while eight clients ask."""

    async def ask_on() -> tuple[float, int, int]:
        """When the last request failed, how many did, and how many there were."""
        async with httpx.AsyncClient(base_url=URL, timeout=HANG_S) as client:
            engines()[0].kill()
            began_s = time.monotonic()
            failed_at_s: list[float] = []
            num_asked = 0

            async def ask() -> None:
                nonlocal num_asked
                while time.monotonic() - began_s < KILL_BAR_S + 3.0:
                    answer = await complete(client, "import os", 4)
                    num_asked += 1
                    if answer.status_code != 200:
                        failed_at_s.append(time.monotonic() - began_s)
                    await asyncio.sleep(LOOK_S / 4)

            await asyncio.gather(*(ask() for _ in range(8)))
            return max(failed_at_s, default=0.0), len(failed_at_s), num_asked

    with deployed(num_replicas="2", num_cpus="0.5"):
        last_error_s, num_errors, num_asked = asyncio.run(ask_on())
        proof.claim(
            last_error_s <= KILL_BAR_S,
            f"an engine is killed: {num_errors} of {num_asked} requests failed, the last after "
            f"{last_error_s:.1f} s",
        )
        until_s = time.monotonic() + HANG_S
        while len(engines()) < 2 and time.monotonic() < until_s:
            time.sleep(LOOK_S)
        proof.claim(len(engines()) == 2, "and replaced")


def prove_scale(proof: Proof) -> None:
    """1, 2, 1 replicas while eight clients ask, and sessions."""

    async def load() -> list[int]:
        async with httpx.AsyncClient(base_url=URL, timeout=HANG_S) as client:
            found: list[int] = []
            is_over = asyncio.Event()

            async def ask(number: int) -> None:
                while not is_over.is_set():
                    answer = await complete(client, f"# {number}\nimport", 16)
                    found.append(answer.status_code)

            clients = [asyncio.create_task(ask(number)) for number in range(8)]
            for num in (2, 1):
                await asyncio.to_thread(scale, num)
                until_s = time.monotonic() + HANG_S
                while len(engines()) != num and time.monotonic() < until_s:
                    await asyncio.sleep(LOOK_S)
                proof.claim(len(engines()) == num, f"{num} replicas under load")
                await asyncio.sleep(2.0)
            is_over.set()
            await asyncio.gather(*clients)
            return found

    def scale(num: int) -> None:
        args = {"model": str(NANO), **SMALL, "num_cpus": "0.5", "session_affinity": "true"}
        app = build({**args, "num_replicas": str(num)})
        serve.run(app, name="weft", route_prefix="/")

    with deployed(num_cpus="0.5", session_affinity="true"):
        statuses = asyncio.run(load())
        num_errors = sum(status != 200 for status in statuses)
        proof.claim(num_errors == 0, f"{len(statuses)} requests, {num_errors} errors")
        scale(2)
        hits = asyncio.run(session_hits())
        proof.claim(min(hits) > 64, "a session stays with its replica", hits)


async def session_hits() -> list[int]:
    """Cached tokens of the second request of eight sessions."""
    found = []
    async with httpx.AsyncClient(base_url=URL, timeout=HANG_S) as client:
        for turn in range(2):
            for number in range(8):
                client.headers["x-session-id"] = f"session {number}"
                text = f"# session {number}\n" + f"import {number}\n" * 40
                usage = (await complete(client, text, 4)).json()["usage"]
                if turn:
                    found.append(usage["prompt_tokens_details"]["cached_tokens"])
    return found


def prove_nodes(proof: Proof) -> None:
    """A replica with a rank on each of two machines answers as one process."""
    with deployed(tp_size="2", nnodes="2", num_cpus="1", dtype="float32"):
        through = httpx.post(f"{URL}/v1/completions", json=ASKED, timeout=HANG_S).json()
        ranks = [one for one in psutil.process_iter(["cmdline"]) if is_rank(one)]
        proof.claim(len(ranks) == 1, "a rank follows on the other machine", len(ranks))
    alone = Server(str(NANO), "--dtype", "float32")
    one = alone.post("/v1/completions", **ASKED)
    alone.stop()
    proof.claim(
        through["choices"][0]["text"] == one["choices"][0]["text"], "two machines answer as one"
    )
    until_s = time.monotonic() + HANG_S
    while any(map(is_rank, psutil.process_iter(["cmdline"]))) and time.monotonic() < until_s:
        time.sleep(LOOK_S)
    proof.claim(not any(map(is_rank, psutil.process_iter(["cmdline"]))), "no rank is left")


ASKED = {"prompt": "import os\n", "max_tokens": 24, "temperature": 0}


def is_rank(process: psutil.Process) -> bool:
    """A rank of a node below a process of Ray's."""
    if "weft.launch.follower" not in (process.info["cmdline"] or []):
        return False
    above = [" ".join(parent.cmdline()) for parent in process.parents()]
    return any("--node-rank" in one for one in above) and any("raylet" in one for one in above)


PROOFS = {"speed": prove_speed, "kill": prove_kill, "scale": prove_scale, "nodes": prove_nodes}


def main(words: Sequence[str]) -> int:
    proof = Proof()
    parser = argparse.ArgumentParser(description="What weft in Ray Serve promises.")
    parser.add_argument("what", nargs="*", choices=[*PROOFS, []])
    parser.add_argument("--model", default=str(NANO), help="for `speed`")
    asked = parser.parse_args(words)
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=2, object_store_memory=10**8, include_dashboard=False)
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    try:
        for name, prove in PROOFS.items():
            if asked.what and name not in asked.what:
                continue
            if name == "speed":
                prove_speed(proof, asked.model)
            else:
                prove(proof)
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()
    return 1 if proof.num_failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
