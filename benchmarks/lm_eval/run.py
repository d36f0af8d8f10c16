"""lm-evaluation-harness against a weft server, beside the same scores computed directly with transformers.

    python benchmarks/lm_eval/run.py --lm-eval ~/lm-eval/bin/lm-eval [--model FOLDER]

Prints one line a score: what the harness says of the server, what transformers says, and the difference.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers

from weft.weights.fetch import BUNDLED

HERE = Path(__file__).parent
START_S = 120


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lm-eval", required=True, help="the harness's program")
    parser.add_argument("--model", default=str(BUNDLED), help="model folder")
    parser.add_argument("--port", type=int, default=30_117)
    options = parser.parse_args()
    with served(options.model, options.port) as url:
        harness = by_harness(options.lm_eval, url)
    direct = Direct(options.model).scores()
    print(f"{'score':18}{'harness':>12}{'transformers':>14}{'difference':>12}")
    for name, value in direct.items():
        print(f"{name:18}{harness[name]:12.6f}{value:14.6f}{abs(harness[name] - value):12.1e}")


@contextmanager
def served(model: str, port: int) -> Iterator[str]:
    """A server in float32, as long as the block runs."""
    command = [
        sys.executable,
        "-m",
        "weft",
        "serve",
        model,
        "--dtype",
        "float32",
        "--port",
        str(port),
    ]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline:
                sys.exit("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def by_harness(program: str, url: str) -> dict[str, float]:
    """Run both tasks with the tokenizer of the server."""
    with tempfile.TemporaryDirectory() as folder:
        with urllib.request.urlopen(f"{url}/v1/models") as answer:
            name = json.load(answer)["data"][0]["id"]
        arguments = (
            f"base_url={url}/v1/completions,model={name},tokenizer_backend=remote,num_concurrent=4"
        )
        command = [program, "run", "--model", "local-completions", "--model_args", arguments]
        command += ["--include_path", ".", "--tasks", "weft_choice,weft_text", "--batch_size", "8"]
        environment = os.environ | {
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_HOME": folder,
        }
        subprocess.run([*command, "--output_path", folder], cwd=HERE, env=environment, check=True)
        [path] = Path(folder).rglob("results_*.json")
        results: dict[str, Any] = json.loads(path.read_text())["results"]
    names = ("weft_choice", "acc"), ("weft_choice", "acc_norm"), ("weft_text", "byte_perplexity")
    return {metric: results[task][f"{metric},none"] for task, metric in names}


class Direct:
    """The same scores by transformers, one sequence at a time."""

    def __init__(self, model: str) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=torch.float32
        ).eval()
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(model)

    def scores(self) -> dict[str, float]:
        right, right_by_byte, docs = 0, 0, read("choice.jsonl")
        for doc in docs:
            values = [self.logprob(doc["prompt"], choice) for choice in doc["choices"]]
            by_byte = [
                value / len(choice) for value, choice in zip(values, doc["choices"], strict=True)
            ]
            right += values.index(max(values)) == doc["answer"]
            right_by_byte += by_byte.index(max(by_byte)) == doc["answer"]
        texts = [doc["text"] for doc in read("text.jsonl")]
        total = sum(self.logprob("", text) for text in texts)
        num_bytes = sum(len(text.encode()) for text in texts)
        return {
            "acc": right / len(docs),
            "acc_norm": right_by_byte / len(docs),
            "byte_perplexity": math.exp(-total / num_bytes),
        }

    def logprob(self, context: str, text: str) -> float:
        """Of the text behind the context; behind the end of a document, if there is none.

        Cut as the harness cuts: spaces at the end of the context belong to the text, and the tokens of the text are
        those of both together, without as many as the context has by itself.
        """
        bare = context.rstrip()
        before = self._ids(bare) if bare else [self._tokenizer.eos_token_id]
        ids = before + (self._ids(context + text)[len(before) :] if bare else self._ids(text))
        with torch.inference_mode():
            rows = self._model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        return float(sum(rows[place - 1, ids[place]] for place in range(len(before), len(ids))))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False).input_ids
        return ids


def read(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / name).read_text().splitlines()]


if __name__ == "__main__":
    main()
