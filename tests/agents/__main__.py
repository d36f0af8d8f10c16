"""Runs released coding agents against weft's front: `scripts/agents [NAME ...]`.

Each is started by `weft launch`, with a home folder of its own, and has to solve its task against a
scripted model. Without a network but loopback nothing can leave the machine. `--install` fetches
the clients, and needs one.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from tests.agents.clients import END, Call, Client, clients
from tests.agents.model import CONTEXT, RESULT, scripted_model

REPOSITORY = Path(__file__).parents[2]
TIME_LIMIT_S = 180
NUM_FULL_TURNS = 16  # of 9 kB each
# Words of clients that ask for a summary, to go on with it instead of the conversation.
LAST_WORDS = 4_000  # characters, of the last message
SUMMARY_WANTED = re.compile(
    "CHECKPOINT COMPACTION|provide your summary|summary process|generate the <state_snapshot>"
)
SUMMARY = (
    "<summary>\n<state_snapshot>\nThe task: change hello.txt so that it says goodbye. "
    "Commands were run, and the file is not changed yet.\n</state_snapshot>\n</summary>"
)
SHARE = 0.98  # of the prompt of the turn before that the next one begins with


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--clients", type=Path, default=Path(tempfile.gettempdir()) / "weft-agents")
    parser.add_argument("--install", action="store_true", help="fetch the clients, and run none")
    parser.add_argument(
        "--turns", type=int, default=0, help="let each task take so many turns, by further commands"
    )
    parser.add_argument(
        "--full", action="store_true", help="fill the context, so that the agent must compact"
    )
    parser.add_argument("--keep", type=Path, help="folder for prompts and logs")
    options = parser.parse_args()
    options.clients = options.clients.absolute()  # the agents run in another folder
    with tempfile.TemporaryDirectory() as folder:
        known = clients(Path(folder) / "work")
        names = options.names or [
            name for name, client in known.items() if client.full_at or not options.full
        ]
        if options.install:
            return max(_install(options.clients, known[name]) for name in names)
        subprocess.run(["ip", "link", "set", "lo", "up"], check=False, capture_output=True)
        failed = [name for name in names if not _run(options, Path(folder), known[name])]
    print(f"{len(names) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def _install(folder: Path, client: Client) -> int:
    folder.mkdir(parents=True, exist_ok=True)
    if client.installer == "npm":
        words = [
            "npm",
            "install",
            "--prefix",
            str(folder),
            "--ignore-scripts",
            "--no-audit",
            "--no-fund",
        ]
        status = subprocess.run([*words, *client.packages], check=False).returncode
        for script in client.after_install:
            path = folder / "node_modules" / script
            status = (
                status
                or subprocess.run(["node", path.name], cwd=path.parent, check=False).returncode
            )
        return status
    own = folder / client.agent
    python = f"python{client.python}" if client.python else sys.executable
    words = [python, "-m", "venv", str(own)]
    if not shutil.which(python) or subprocess.run(words, check=False).returncode:
        print(f"{client.agent} needs {python}, which does not run here")
        return 1
    return subprocess.run(
        [own / "bin" / "pip", "install", "-q", *client.packages], check=False
    ).returncode


def _run(options: argparse.Namespace, folder: Path, client: Client) -> bool:
    """Run one client in an empty home. Returns whether it did all that it should."""
    work, home = folder / "work", folder / "home"
    for one in (work, home):
        shutil.rmtree(one, ignore_errors=True)
        one.mkdir()
    (work / "hello.txt").write_text("hello\n")
    subprocess.run(["git", "init", "-q", "."], cwd=work, check=True)
    written: list[str] = []
    num_summaries = 0

    def say(prompt: str) -> str:
        nonlocal num_summaries
        if options.full and SUMMARY_WANTED.search(prompt[-LAST_WORDS:]):
            num_summaries += 1
            written.append("")
            return SUMMARY
        if client.tool_mark not in prompt:
            written.append("")
            return "A greeting"
        number = sum(map(bool, written))
        if client.calls and not options.full:
            number = prompt.count(RESULT)
        written.append(_answer(client, number, options))
        return written[-1]

    begun = time.monotonic()
    context = client.full_at if options.full else CONTEXT
    told = 0 if client.full_told else CONTEXT
    with scripted_model(say, context=context, told=told) as (server, prompts):
        command = [
            sys.executable,
            "-m",
            "weft",
            "launch",
            client.agent,
            "--url",
            server.url,
            "--",
            *client.arguments,
        ]
        process = subprocess.run(
            command,
            cwd=work,
            env=_environment(options.clients, home, client),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIME_LIMIT_S,
            check=False,
        )
    seconds = time.monotonic() - begun
    shares = _shares(prompts, written)
    is_edited = (work / "hello.txt").read_text() == "goodbye\n"
    status = client.full_status if options.full else 0
    is_right = process.returncode == status and is_edited
    if options.full:
        lens = [len(prompt) for prompt in prompts]
        print(f"summaries {num_summaries}, characters of prompts {lens}")
        is_right = is_right and num_summaries > 0
    else:
        is_right = is_right and all(share >= SHARE for share, _ in shares)
    least = " and ".join(f"{min(one):.4f}" for one in zip(*shares, strict=True)) or "-"
    print(
        f"{client.agent:10} {'ok' if is_right else 'FAILED':7} "
        f"status {process.returncode}, edited {is_edited}, "
        f"{len(prompts)} requests, least shares of the turn before {least}, {seconds:.0f} s",
        flush=True,
    )
    if options.keep:
        kept = options.keep / client.agent
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir(parents=True)
        for number, prompt in enumerate(prompts):
            (kept / f"{number:02d}.txt").write_text(prompt)
        (kept / "log").write_text(process.stdout + process.stderr)
    if not is_right:
        print((process.stdout + process.stderr)[-2_000:])
    return is_right


def _environment(folder: Path, home: Path, client: Client) -> dict[str, str]:
    """Variables for a client in a home of its own, with no key of the user's."""
    path = (
        f"{folder / 'node_modules' / '.bin'}:{folder / client.agent / 'bin'}:{os.environ['PATH']}"
    )
    return {
        "PATH": path,
        "HOME": str(home),
        "TERM": "dumb",
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(REPOSITORY),
        **dict(client.variables),
    }


def _answer(client: Client, number: int, options: argparse.Namespace) -> str:
    if client.says:
        return client.says[min(number, len(client.says) - 1)]
    calls = _calls(client, NUM_FULL_TURNS if options.full else options.turns)
    if options.full:  # what the commands print fills the context
        words = json.dumps(calls).replace("echo ", "seq 1 2000; echo ")
        calls = json.loads(words)
    if number >= len(calls):
        return f"<think>\nAll is done.\n</think>\n\n{END}"
    name, arguments = calls[number]
    call = json.dumps({"name": name, "arguments": arguments})
    thought = f"<think>\nStep {number}.\n</think>"
    return f"{thought}\n\nNow step {number}.\n<tool_call>\n{call}\n</tool_call>"


def _calls(client: Client, num_turns: int) -> list[Call]:
    """The calls of the task, with further ones behind the first, up to the number of turns."""
    first, *rest = client.calls
    more: list[Call] = []
    if client.again is not None:
        name, arguments = client.again
        for number in range(num_turns - 1 - len(client.calls)):
            numbered = {
                key: value.replace("NUMBER", str(number)) if isinstance(value, str) else value
                for key, value in arguments.items()
            }
            more.append((name, numbered))
    # Some clients edit only what was read since the last summary.
    return [first, *more, first, *rest] if more else [first, *rest]


def _shares(prompts: list[str], written: list[str]) -> list[tuple[float, float]]:
    """For each turn of the task, the share of the prompt before that its prompt begins with, and
    the share of that prompt together with its answer: some clients send no reasoning back."""
    turns = [(prompt, said) for prompt, said in zip(prompts, written, strict=True) if said]
    found = []
    for (before, said), (prompt, _) in pairwise(turns):
        alike = _num_alike(before + said, prompt)
        found.append((min(alike / len(before), 1.0), alike / len(before + said)))
    return found


def _num_alike(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


if __name__ == "__main__":
    sys.exit(main())
