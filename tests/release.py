"""Tries an installed weft: its files, its command, a completion, a server. `scripts/release` copies
this file out of the checkout and runs it in a fresh environment without a compiler.

Nothing here imports from the tests, and nothing but weft need be installed.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import urllib.request
from importlib.metadata import distribution
from pathlib import Path

NAME = "weft-llm"
TIMEOUT_S = 300
READY = re.compile(r"http://127\.0\.0\.1:(\d+)")


def output(*argv: str) -> str:
    """What `weft` prints with these arguments."""
    done = subprocess.run(
        ["weft", *argv], capture_output=True, text=True, check=False, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"weft {' '.join(argv)}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(holds: bool, what: str) -> None:
    print(f"  {'ok' if holds else 'WRONG'}: {what}")
    if not holds:
        sys.exit(1)


def check_files() -> None:
    import weft

    found = distribution(NAME)
    folder = Path(weft.__file__).parent
    check(found.version == weft.__version__, f"{NAME} {found.version} has the package weft")
    check(not (Path.cwd() / "weft").exists(), "the package is the installed one")
    check((folder / "py.typed").is_file(), "it has its types")
    check(any((folder / "ops" / "cpp").glob("*.so")), "it has the kernels")
    check(shutil.which("g++") is None and shutil.which("clang++") is None, "there is no compiler")


def check_commands() -> None:
    check(output("version").startswith("weft "), "weft version")
    check("usage: weft COMMAND" in output("--help"), "weft --help")
    check("_weft()" in output("completion", "bash"), "weft completion bash")
    (kernels,) = re.findall(
        r"^.*kernels.*$", output("doctor", "weft-nano", "--port", "0"), re.MULTILINE
    )[:1]
    check("torch" not in kernels, f"weft doctor: {' '.join(kernels.split())}")
    text = output("generate", "weft-nano", "--prompt", "def ", "--max-tokens", "8")
    check(bool(text.strip()), "weft generate")


def check_server() -> None:
    server = subprocess.Popen(
        ["weft", "serve", "weft-nano", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert server.stdout is not None
        seen = []
        address = None
        for line in server.stdout:
            seen.append(line)
            if address := READY.search(line):
                break
        check(
            address is not None, f"weft serve\n{''.join(seen) if address is None else ''}".rstrip()
        )
        assert address is not None
        body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{address[0]}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            usage = json.load(answer)["usage"]
        check(usage["completion_tokens"] > 0, "a chat")
    finally:
        server.terminate()
        status = server.wait(TIMEOUT_S)
    check(status == 0, "the server ends")


if __name__ == "__main__":
    print(f"Python {sys.version.split()[0]}")
    check_files()
    check_commands()
    check_server()
