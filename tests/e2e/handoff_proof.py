"""Random requests through a prefill and a decode server, compared with one server bit for bit,
while servers are killed, stopped or made to refuse at random moments.

python -m tests.e2e.handoff_proof [--requests 500] [--kinds kill,hang,refuse] [--seed 1] [--rest-s
8] [--seconds 60] [--front] [--sealed] [--head]

`--kinds` says what happens meanwhile: `kill` and `hang` are about the prefill server, `refuse` lets
it drop what it has, `weights` gives it other ones for a while; `kill_decode` is about the decode
server, whose requests may end with an error then; `strangers` come to the port of the prefill
server without its secret, and `false_lender` is named to the decode server by a client: both only
with `--sealed`, where the servers have a secret; `none`: nothing happens. Between two of these are
`--rest-s` at most. After `--seconds` no more requests are sent. With `--front` all requests go
through `weft route`. With `--head`, both guess with an EAGLE-3 head at random.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import json
import math
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file, save_file

from tests.e2e import handoff_strangers
from tests.e2e.random_heads import save_eagle3
from tests.e2e.server import HANG_S, Server, start, wait_until
from tests.handoff.peer import RogueLender
from weft.weights.known import BUNDLED

# However busy the machine is, no request ends for want of time, and an engine that gets no
# processor for a while does not count as hung, so that its answers would be errors (503).
CALM = ("--hang-after-s", str(HANG_S))
PATIENCE = ("--handoff-wait-s", str(HANG_S))
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"enum": [1, 2, 30]}},
    "required": ["name", "n"],
}
# Of calls, whose time no option says.
NOT_IN_TIME = "the engine has not answered for"
# What tells of the machine, of the time, or of the way.
IGNORED = {"id", "created", "e2e_latency", "cached_tokens", "prompt_tokens_details", "rid"}
KINDS = ("kill", "hang", "refuse", "weights", "kill_decode")
HOSTILE = ("strangers", "false_lender")
SECRET = ("--handoff-secret", "a secret of both servers")
PORTS = range(20_000, 30_000)
NORM = "model.layers.0.input_layernorm.weight"
LEASE_S = 8.0  # of the prefill server
REST_AFTER_S = 60.0  # until both sides hold nothing any more
REST_S = 8.0  # the longest time between two troubles


def free_port() -> int:
    """One that no outgoing connection is given by the system, while nobody listens on it."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise AssertionError("no port is free")


class Trio:
    """One server alone, which starts when it is first asked, and two that share the work."""

    def __init__(self, *options: str, model: str = "weft-nano") -> None:
        self._model = model
        self._root = tempfile.TemporaryDirectory(prefix="weft-handoff-")
        make_weights(Path(self._root.name))
        options = ("--weights-root", self._root.name, *options)
        self.port = free_port()
        self.options = (
            model,
            *PATIENCE,
            "--disaggregation-bootstrap-port",
            str(self.port),
            *options,
        )
        self.lending = (*self.options, "--disaggregation-mode", "prefill")
        self.taking = (*self.options, *CALM, "--disaggregation-mode", "decode")
        self.prefill = Server(*self.lending, "--port", str(free_port()))
        self.decode = Server(*self.taking, "--port", str(free_port()))
        self._rooms = random.Random("rooms")
        self.front: Front | None = None

    @cached_property
    def alone(self) -> Server:
        return Server(self._model, *CALM)

    def open_front(self) -> None:
        """From here on, requests for both go through `weft route`."""
        self.front = Front(
            *("--prefill", self.prefill.url, str(self.port)),
            *("--decode", self.decode.url),
        )

    def stop(self) -> None:
        if self.front is not None:
            self.front.stop()
        if "alone" in self.__dict__:
            self.alone.stop()
        for server in (self.prefill, self.decode):
            server.stop()
        self._root.cleanup()

    @staticmethod
    def give_weights(server: Server, name: str) -> None:
        """`same` are those of the server alone; with `other` ones, K and V are others."""
        assert server.post("/update_weights_from_disk", model_path=name)["success"]

    def restart_prefill(self) -> None:
        """Kill it, and start it at the same address."""
        port = self.prefill.url.rpartition(":")[2]
        self.prefill.stop(signal.SIGKILL)
        self.prefill = Server(*self.lending, "--port", port)

    def restart_decode(self) -> None:
        """Kill it, and start it at the same address."""
        port = self.decode.url.rpartition(":")[2]
        self.decode.stop(signal.SIGKILL)
        self.decode = Server(*self.taking, "--port", port)

    @property
    def url(self) -> str:
        """Where answers come from."""
        return self.decode.url if self.front is None else self.front.url

    def place(self) -> dict[str, Any]:
        """The fields of a room that nobody has used."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": self._rooms.randrange(2**63),
        }

    def both(self, path: str, body: dict[str, Any], num_events: int | None = None) -> Any:
        """What the decode server answers; the prefill server is asked at the same time."""
        if self.front is None:
            body = {**body, **self.place()}
            asked = (self.prefill.url, path, body, num_events)
            threading.Thread(target=ask, args=asked, daemon=True).start()
        return ask(self.url, path, body, num_events)


def make_weights(root: Path) -> None:
    """Folders that servers may load."""
    for name in ("same", "other"):
        shutil.copytree(BUNDLED, root / name)
    (file,) = (root / "other").glob("*.safetensors")
    tensors = load_file(file)
    save_file({**tensors, NORM: -tensors[NORM]}, file)


class Front:
    """`weft route` as a child process."""

    def __init__(self, *options: str) -> None:
        words = ["route", "--port", "0", "--probe-s", "0.2", "--prefill-wait-s", "5"]
        self.process = start([*words, *options])
        assert self.process.stderr is not None
        found = re.search(r"ready in .* (http://\S+)", self.process.stderr.readline())
        assert found is not None
        self.url = found[1]
        self._rest = threading.Thread(target=self.process.stderr.read, daemon=True)
        self._rest.start()  # so that it never waits for a reader
        assert wait_until(self.has_both)

    def has_both(self) -> bool:
        """Whether requests go to both servers."""
        return route_numbers(self).count('"} 1.0') >= 2

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(HANG_S)
        self._rest.join()
        assert self.process.stderr is not None
        self.process.stderr.close()


def route_numbers(front: Front) -> str:
    """Which servers get requests, as its metrics say it."""
    with urllib.request.urlopen(front.url + "/metrics", timeout=HANG_S) as answer:
        lines: list[str] = answer.read().decode().splitlines()
    return "\n".join(line for line in lines if line.startswith("weft:route_server_up{"))


# One answer


def ask(url: str, path: str, body: dict[str, Any], num_events: int | None = None) -> Any:
    """The answer as JSON, or its events; of an error, its status, or 0 if none came. After
    `num_events` the connection is closed. What an engine has had no time for is asked again."""
    until_s = time.monotonic() + HANG_S
    while True:
        try:
            return answer_of(url, path, body, num_events)
        except NotInTime:
            if time.monotonic() > until_s:
                return 503


class NotInTime(Exception):
    """The machine is so busy that an engine has not answered a call in time."""


def answer_of(url: str, path: str, body: dict[str, Any], num_events: int | None) -> Any:
    """As `ask`. Raises NotInTime."""
    request = urllib.request.Request(
        url + path,
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:
            if answer.headers["Content-Type"].startswith("text/event-stream"):
                return list(itertools.islice(events(answer), num_events))
            return json.load(answer)
    except urllib.error.HTTPError as exc:
        with exc:
            message = exc.read(2_000).decode()
        if exc.code >= 500:
            tell("an error", url=url + path, status=exc.code, body=message)
        if exc.code == 503 and NOT_IN_TIME in message:
            raise NotInTime from exc
        return exc.code
    except (OSError, http.client.HTTPException) as exc:
        tell("no answer", url=url + path, error=repr(exc))
        return 0


def events(answer: http.client.HTTPResponse) -> Iterator[Any]:
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])


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
    if any("error" in value for value in values):
        return ["error"]
    texts: dict[int, list[str]] = {}
    for value in values:
        for choice in value["choices"]:
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            texts.setdefault(choice["index"], []).append(text + str(choice["finish_reason"] or ""))
    return sorted((index, "".join(parts)) for index, parts in texts.items())


def is_answer(answer: Any) -> bool:
    """Whether it is one, and not an error."""
    if isinstance(answer, dict):
        return True
    return isinstance(answer, list) and "error" not in answer


# Requests


class Errand(NamedTuple):
    """What a client does."""

    path: str
    body: dict[str, Any]
    num_events: int | None = None  # after which the client has enough
    turns: tuple[dict[str, Any], ...] = ()  # of a session

    def of_both(self, trio: Trio) -> Any:
        if self.turns:
            return talk(trio.url, self.path, self.turns)
        return plain(trio.both(self.path, self.body, self.num_events))

    def of_one(self, trio: Trio) -> Any:
        """What one server alone answers."""
        if self.turns:
            return talk(trio.alone.url, self.path, self.turns)
        return plain(ask(trio.alone.url, self.path, self.body))

    def is_right(self, answer: Any, whole: Any) -> bool:
        """Whether `answer` is what one server alone has answered, or the beginning of that."""
        if self.num_events is None:
            return bool(answer == whole)
        if not is_answer(answer) or not is_answer(whole):
            return False
        texts = dict(whole)
        return all(texts[index].startswith(text) for index, text in answer)


def talk(url: str, path: str, turns: Sequence[dict[str, Any]]) -> Any:
    """The answers to the turns of a new session."""
    session = ask(url, "/open_session", {"capacity_of_str_len": 100_000})
    if isinstance(session, int):
        return ["error", session]
    answers: list[Any] = []
    for turn in turns:
        place = {"id": session}
        if answers:
            place["rid"] = answers[-1]["meta_info"]["id"]
        answer = ask(url, path, {**turn, "session_params": place})
        if not isinstance(answer, dict):
            return ["error", answer]
        answers.append(answer)
    ask(url, "/close_session", {"session_id": session})
    return [plain(answer) for answer in answers]


def random_errand(rng: random.Random, families: list[list[int]]) -> Errand:
    family = rng.choice(families)
    ids = family[: rng.randrange(1, len(family))]
    if rng.random() < 0.7:  # so that nothing of it is cached
        ids = [rng.randrange(10, 4_000), *ids]
    ids = ids + [rng.randrange(10, 4_000) for _ in range(rng.choice([0, 1, 20]))]
    sampling: dict[str, Any] = {"max_new_tokens": rng.randrange(1, 24), "temperature": 0.0}
    if rng.random() < 0.5:
        sampling.update(temperature=0.8, seed=rng.randrange(1_000), top_p=0.9)
    plainly = {"input_ids": ids, "sampling_params": sampling}
    match rng.randrange(9):
        case 0:
            wishes = {"return_logprob": True, "top_logprobs_num": 3}
            if rng.random() < 0.5:
                wishes["logprob_start_len"] = rng.randrange(len(ids))
            return Errand("/generate", {**plainly, **wishes})
        case 1:
            sampling.update(n=2, regex="[a-z]{4,12}")
            return Errand("/generate", plainly)
        case 2:
            content = " ".join(f"word{number}" for number in ids)[: rng.randrange(40, 900)]
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            wishes = {"response_format": form, "logprobs": True, "top_logprobs": 2, "seed": 3}
            messages = [{"role": "user", "content": content}]
            body = {"messages": messages, "max_tokens": 40, **wishes}
            return Errand("/v1/chat/completions", body)
        case 3:
            wishes = {"stream": True, "n": 2, "temperature": 0.7, "seed": rng.randrange(99)}
            return Errand("/v1/completions", {"prompt": ids, "max_tokens": 12, **wishes})
        case 4:
            batch = [ids, ids[: len(ids) // 2 + 1], family[:40]]
            return Errand("/generate", {"input_ids": batch, "sampling_params": sampling})
        case 5:
            wishes = {"stop": [rng.choice("aeinost "), " the"], "temperature": 0.0}
            return Errand("/v1/completions", {"prompt": ids, "max_tokens": 30, **wishes})
        case 6:
            wishes = {"stream": True, "temperature": 0.9, "seed": rng.randrange(99)}
            body = {"prompt": ids, "max_tokens": 60, **wishes}
            return Errand("/v1/completions", body, num_events=rng.randrange(8))
        case 7:
            turns = [{"input_ids": ids[:100], "sampling_params": sampling}]
            for _ in range(rng.randrange(1, 3)):
                more = [rng.randrange(10, 4_000) for _ in range(rng.randrange(1, 40))]
                turns.append({"input_ids": more, "sampling_params": sampling})
            return Errand("/generate", {}, turns=tuple(turns))
    sampling["frequency_penalty"] = 0.5
    return Errand("/generate", plainly)


# What happens to the servers meanwhile


class Troubles:
    """One after the other on a thread, with a rest in between. `count` is about what has happened;
    the decode server was `touched` so often."""

    def __init__(self, trio: Trio, rng: random.Random, kinds: Sequence[str], rest_s: float) -> None:
        self._trio = trio
        self._rest_s = rest_s
        self._rng = rng
        self._kinds = kinds
        self._is_over = threading.Event()
        self._failed: list[BaseException] = []
        self._thread = threading.Thread(target=self._run)
        self.count = Counter[str]()
        self.touched = 0

    def __enter__(self) -> Troubles:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._is_over.set()
        self._thread.join()
        if self._failed:
            raise self._failed[0]

    def _run(self) -> None:
        try:
            while self._kinds and not self._is_over.wait(self._rng.uniform(0.1, self._rest_s)):
                kind = self._rng.choice(self._kinds)
                tell(kind)
                getattr(self, f"_{kind}")()
                tell(f"{kind} is over")
                self.count[kind] += 1
        except BaseException as exc:
            tell("a trouble failed", error=repr(exc))
            for name, server in (("prefill", self._trio.prefill), ("decode", self._trio.decode)):
                tell(name, lines=server.lines[-40:])
            self._failed.append(exc)

    def _kill(self) -> None:
        engine_first = self._rng.random() < 0.5
        if engine_first:
            self._trio.prefill.engine.kill()
            time.sleep(self._rng.uniform(0.0, 1.0))
        self._trio.restart_prefill()

    def _hang(self) -> None:
        engine = self._trio.prefill.engine
        engine.suspend()
        time.sleep(self._rng.choice([0.2, 1.0, 7.0, 12.0]))
        engine.resume()

    def _refuse(self) -> None:
        server = self._trio.prefill
        if self._rng.random() < 0.5:
            server.post("/abort_request", abort_all=True)
        try:
            server.post("/flush_cache")
        except urllib.error.HTTPError as exc:  # requests are running
            exc.close()

    def _weights(self) -> None:
        """The prefill server has other weights for a while."""
        self._trio.give_weights(self._trio.prefill, "other")
        time.sleep(self._rng.uniform(0.0, 2.0))
        self._trio.give_weights(self._trio.prefill, "same")

    def _kill_decode(self) -> None:
        self.touched += 1
        self._trio.decode.process.kill()
        if self._rng.random() < 0.5:
            is_empty = wait_until(self._nothing_is_lent, REST_AFTER_S)
            self.count["leases that did not end"] += not is_empty
        self._trio.restart_decode()
        # Until it has asked, the front answers with 503 what goes to the decode server alone.
        assert self._trio.front is None or wait_until(self._trio.front.has_both)
        self.touched += 1

    def _strangers(self) -> None:
        """They come one after the other; none harms a request."""
        for _ in range(self._rng.randrange(1, 12)):
            name = handoff_strangers.come(self._trio.port, self._rng)
            self.count[f"stranger: {name}"] += 1

    def _false_lender(self) -> None:
        """A client names a lender that does not know the secret: the answer is right all the
        same."""
        ids = [self._rng.randrange(10, 4_000) for _ in range(200)]
        body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 8, "temperature": 0.0}}
        expected = ask(self._trio.alone.url, "/generate", body)
        with RogueLender(handoff_strangers.lend_falsely) as rogue:
            place = {**self._trio.place(), "bootstrap_port": rogue.port}
            answer = ask(self._trio.decode.url, "/generate", {**body, **place})
        assert plain(answer) == plain(expected), (body, answer, expected)

    def _nothing_is_lent(self) -> bool:
        return not numbers(self._trio.prefill)["kv_lent_tokens"]


def tell(what: str, **more: object) -> None:
    """A line of the proof's own log: the time of day, what has happened, and all about it."""
    print(f"{datetime.now():%H:%M:%S} {what}", json.dumps(more, default=str), flush=True)


def compare(
    trio: Trio,
    rng: random.Random,
    num_requests: int,
    kinds: Sequence[str] = (),
    rest_s: float = REST_S,
    seconds: float = math.inf,
) -> tuple[Counter[str], list[Errand]]:
    """Send requests, some together, none when `seconds` are over. Returns what has happened, and
    the requests whose answers are not those of one server."""
    assert trio.alone.url, "it starts before several threads ask it"
    families = [[rng.randrange(10, 4_000) for _ in range(600)] for _ in range(4)]
    errands = [random_errand(rng, families) for _ in range(num_requests)]
    count = Counter[str]()
    wrong: list[Errand] = []
    until_s = time.monotonic() + seconds

    def run(errand: Errand) -> None:
        if time.monotonic() > until_s:
            return
        assert wait_until(lambda: troubles.touched % 2 == 0)  # the decode server is there
        touched = troubles.touched
        answer = errand.of_both(trio)
        if not is_answer(answer) and troubles.touched != touched:
            count["ended with an error"] += 1  # as the decode server was killed
            return
        expected = errand.of_one(trio)
        if errand.is_right(answer, expected):
            count["right"] += 1
            return
        wrong.append(errand)
        tell("wrong", errand=errand, answer=answer, expected=expected)
        tell("asked again", answer=errand.of_both(trio), expected=errand.of_one(trio))

    with (
        Troubles(trio, random.Random(rng.random()), kinds, rest_s) as troubles,
        ThreadPoolExecutor(8) as pool,
    ):
        list(pool.map(run, errands))
    return count + troubles.count, wrong


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
    if not wait_until(lambda: not numbers(trio.prefill)["kv_lent_tokens"], REST_AFTER_S):
        return False
    audits = [server.post("/audit") for server in (trio.prefill, trio.decode)]
    return all(not audit["faults"] and not audit["held"] for audit in audits)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--rest-s", type=float, default=REST_S)
    parser.add_argument("--front", action="store_true")
    parser.add_argument("--sealed", action="store_true")
    parser.add_argument("--head", action="store_true")
    asked = parser.parse_args()
    kinds = [kind for kind in asked.kinds.split(",") if kind != "none"]
    known = KINDS + HOSTILE * asked.sealed
    assert set(kinds) <= set(known), known
    root = tempfile.TemporaryDirectory(prefix="weft-head-")
    options = ["--handoff-lease-s", str(LEASE_S), *SECRET * asked.sealed]
    if asked.head:
        options += ["--draft-model", str(save_eagle3(Path(root.name) / "head"))]
    trio = Trio(*options)
    try:
        return prove(trio, asked, kinds)
    finally:
        root.cleanup()
        trio.stop()


def prove(trio: Trio, asked: argparse.Namespace, kinds: Sequence[str]) -> int:
    """Print what has happened. Returns the exit status."""
    if asked.front:
        trio.open_front()
    began_s = time.monotonic()
    rng = random.Random(asked.seed)
    count, wrong = compare(trio, rng, asked.requests, kinds, asked.rest_s, asked.seconds)
    num_sent = count["right"] + count["ended with an error"] + len(wrong)
    print(f"{num_sent} requests, {len(wrong)} wrong, {time.monotonic() - began_s:.0f} s")
    print(dict(count))
    is_at_rest = come_to_rest(trio)
    print("prefill", numbers(trio.prefill))
    print("decode", numbers(trio.decode))
    print("at rest:", is_at_rest)
    return int(bool(wrong) or not is_at_rest or count["leases that did not end"] > 0)


if __name__ == "__main__":
    sys.exit(main())
