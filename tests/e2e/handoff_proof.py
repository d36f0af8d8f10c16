"""Random requests through a prefill and a decode server, compared with one server bit for bit, and what becomes of them
when either side is killed or stopped.

python -m tests.e2e.handoff_proof [--requests 500] [--kills 20] [--seed 1] [--front]

With `--front` all requests go through `weft route`.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.e2e.server import HANG_S, Server, wait_until

MODEL = ("weft-nano", "--handoff-wait-s", str(HANG_S))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2, 30]}},
    "required": ["name", "n"],
}
# What tells of the machine, of the time, or of the way.
IGNORED = {"id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details", "rid"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Trio:
    """One server alone, and two that share the work."""

    def __init__(self, *options: str) -> None:
        self.port = free_port()
        self.options = (*MODEL, "--disaggregation-bootstrap-port", str(self.port), *options)
        self.alone = Server("weft-nano")
        self.prefill = Server(*self.options, "--disaggregation-mode", "prefill")
        self.decode = Server(*self.options, "--disaggregation-mode", "decode")
        self._rooms = random.Random("rooms")

        self.front: Front | None = None

    def open_front(self) -> None:
        """From here on, requests for both go through `weft route`."""
        self.front = Front(
            *("--prefill", self.prefill.url, str(self.port)),
            *("--decode", self.decode.url),
        )

    def stop(self) -> None:
        if self.front is not None:
            self.front.stop()
        for server in (self.alone, self.prefill, self.decode):
            server.stop()

    def restart_prefill(self) -> None:
        """At the same address."""
        port = self.prefill.url.rpartition(":")[2]
        self.prefill.stop(signal.SIGKILL)
        self.prefill = Server(*self.options, "--port", port, "--disaggregation-mode", "prefill")

    def restart_decode(self) -> None:
        """At the same address."""
        port = self.decode.url.rpartition(":")[2]
        self.decode.stop(signal.SIGKILL)
        self.decode = Server(*self.options, "--port", port, "--disaggregation-mode", "decode")

    def place(self) -> dict[str, Any]:
        """The fields of a room that nobody has used."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": self._rooms.randrange(2**63),
        }

    def both(self, path: str, body: dict[str, Any]) -> Any:
        """What the decode server answers; the prefill server is asked at the same time."""
        if self.front is not None:
            return ask(self.front.url, path, body)
        shared = {**body, **self.place()}
        threading.Thread(target=ask, args=(self.prefill.url, path, shared), daemon=True).start()
        return ask(self.decode.url, path, shared)

    def agrees(self, path: str, body: dict[str, Any]) -> bool:
        return plain(self.both(path, body)) == plain(ask(self.alone.url, path, body))


class Front:
    """`weft route` as a child process."""

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-m", "weft", "route", "--port", "0", "--probe-s", "0.2"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        found = re.search(r"ready in .* (http://\S+)", self.process.stderr.readline())
        assert found is not None
        self.url = found[1]
        self._rest = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._rest.start()  # so that it never waits for a reader
        assert wait_until(lambda: route_numbers(self).count('"} 1.0') >= 2)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(HANG_S)
        self._rest.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def route_numbers(front: Front) -> str:
    """Which servers get requests, as its metrics say it."""
    with urllib.request.urlopen(front.url + "/metrics", timeout=HANG_S) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("weft:route_server_up{"))


def ask(url: str, path: str, body: dict[str, Any]) -> Any:
    """The answer as JSON, or the data of all its events; of an error, its status."""
    request = urllib.request.Request(
        url + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            content = answer.read().decode()
    except urllib.error.HTTPError as exc:
        return exc.code
    except OSError as exc:
        return f"{type(exc).__name__}"
    if not content.startswith("data:"):
        return json.loads(content)
    lines = [line[6:] for line in content.split("\n\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def plain(answer: Any) -> Any:
    """An answer without what may differ."""
    if isinstance(answer, dict):
        return {key: plain(value) for key, value in answer.items() if key not in IGNORED}
    if isinstance(answer, list):
        return joined([plain(value) for value in answer])
    return answer


def joined(values: list[Any]) -> list[Any]:
    """Events of a stream, whose borders depend on the time, as one text for each choice."""
    if not (values and isinstance(values[0], dict) and "choices" in values[0]):
        return values
    texts: dict[int, list[str]] = {}
    for value in values:
        for choice in value["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts.setdefault(choice["index"], []).append(text + str(choice["finish_reason"] or ""))
    return sorted((index, "".join(parts)) for index, parts in texts.items())


def random_request(rng: random.Random, families: list[list[int]]) -> tuple[str, dict[str, Any]]:
    """A path and a body."""
    family = rng.choice(families)
    ids = family[: rng.randrange(1, len(family))]
    ids = ids + [rng.randrange(10, 4_000) for _ in range(rng.choice([0, 1, 20]))]
    sampling: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0.0}
    if rng.random() < 0.5:
        sampling.update(temperature=0.8, seed=rng.randrange(1_000), top_p=0.9)
    match rng.randrange(6):
        case 0:
            wishes = {"return_logprob": True, "top_logprobs_num": 3}
            if rng.random() < 0.5:
                wishes["logprob_start_len"] = rng.randrange(len(ids))
            return "/generate", {"input_ids": ids, "sampling_params": sampling, **wishes}
        case 1:
            sampling.update(n=2, regex="[a-z]{4,12}")
            return "/generate", {"input_ids": ids, "sampling_params": sampling}
        case 2:
            content = " ".join(f"word{number}" for number in ids)[: rng.randrange(40, 900)]
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            wishes = {"response_format": form, "logprobs": True, "top_logprobs": 2, "seed": 3}
            messages = [{"role": "user", "content": content}]
            return "/v1/chat/completions", {"messages": messages, "max_tokens": 40, **wishes}
        case 3:
            wishes = {"stream": True, "n": 2, "temperature": 0.7, "seed": rng.randrange(99)}
            return "/v1/completions", {"prompt": ids, "max_tokens": 12, **wishes}
        case 4:
            batch = [ids, ids[: len(ids) // 2 + 1], family[:40]]
            return "/generate", {"input_ids": batch, "sampling_params": sampling}
    sampling["frequency_penalty"] = 0.5
    return "/generate", {"input_ids": ids, "sampling_params": sampling}


def compare(trio: Trio, rng: random.Random, num_requests: int) -> list[tuple[str, dict[str, Any]]]:
    """Send requests, some together. Returns those whose answers differ."""
    families = [[rng.randrange(10, 4_000) for _ in range(600)] for _ in range(4)]
    requests = [random_request(rng, families) for _ in range(num_requests)]
    with ThreadPoolExecutor(8) as pool:
        agreed = list(pool.map(lambda one: trio.agrees(*one), requests))
    return [one for one, is_right in zip(requests, agreed, strict=True) if not is_right]


def numbers(server: Server) -> dict[str, float]:
    """The metrics of handoff."""
    found: dict[str, float] = {}
    with urllib.request.urlopen(server.url + "/metrics", timeout=HANG_S) as answer:
        for line in answer.read().decode().splitlines():
            name, _, value = line.rpartition(" ")
            if name.startswith(
                ("weft:handoff", "weft:num_prefill_", "weft:num_decode_", "weft:kv_lent")
            ):
                label = name.partition('reason="')[2].partition('"')[0]
                found[name.removeprefix("weft:").partition("{")[0] + label] = float(value)
    return found


def come_to_rest(trio: Trio) -> bool:
    """Whether both sides hold nothing any more, soon, and their books are right."""
    if not wait_until(lambda: not numbers(trio.prefill)["kv_lent_tokens"], 60.0):
        return False
    audits = [server.post("/audit") for server in (trio.prefill, trio.decode)]
    return all(not audit["faults"] and not audit["held"] for audit in audits)


def torture(trio: Trio, rng: random.Random, num_kills: int) -> Counter[str]:
    """Kill either server, or stop the prefill server, while requests are under way. Every answer that
    comes must be right, and none is missing but those of a decode server that was killed."""
    count = Counter[str]()
    for _ in range(num_kills):
        families = [[rng.randrange(10, 4_000) for _ in range(1_500)] for _ in range(4)]
        requests = []
        for family in families:
            sampling = {"max_new_tokens": 12, "temperature": 0.0}
            requests.append({"input_ids": family, "sampling_params": sampling})
        how = rng.choice(["kill", "stop", "kill decode"])
        count[how] += 1
        with ThreadPoolExecutor(8) as pool:
            answers = [pool.submit(trio.both, "/generate", one) for one in requests]
            time.sleep(rng.choice([0.0, 0.05, 0.2, 0.5, 1.0]))
            if how == "kill":
                trio.prefill.engine.kill()
            elif how == "kill decode":
                trio.decode.process.kill()
            else:
                trio.prefill.engine.suspend()
            told = [answer.result() for answer in answers]
        for one, answer in zip(requests, told, strict=True):
            if how == "kill decode" and not isinstance(answer, dict):
                count["died"] += 1
                continue
            count["answers"] += 1
            count["wrong"] += plain(answer) != plain(ask(trio.alone.url, "/generate", one))
        if how == "stop":
            trio.prefill.engine.resume()
        if how == "kill decode":
            count["held"] += not wait_until(
                lambda: not numbers(trio.prefill)["kv_lent_tokens"], 90.0
            )
            trio.restart_decode()
        else:
            trio.restart_prefill()
        count["unclean"] += not come_to_rest(trio)
    return count


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--front", action="store_true")
    asked = parser.parse_args()
    rng = random.Random(asked.seed)
    trio = Trio()
    if asked.front:
        trio.open_front()
    different = compare(trio, rng, asked.requests)
    print(f"{asked.requests} requests, {len(different)} with another answer")
    for path, body in different[:3]:
        print(path, json.dumps(body)[:600])
    print("prefill", numbers(trio.prefill))
    print("decode", numbers(trio.decode))
    print("at rest:", come_to_rest(trio))
    if asked.kills:
        print(dict(torture(trio, rng, asked.kills)))
        print("decode", numbers(trio.decode))
    trio.stop()


if __name__ == "__main__":
    main()
