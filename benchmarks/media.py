"""What pictures cost those who send them, and those who do not.

python benchmarks/media.py --make ~/models/smolvlm   # random weights in the shape of SmolVLM-256M
python benchmarks/media.py ~/models/smolvlm --threads 2

On a machine that others use, start the server before (`weft serve ~/models/smolvlm --load-format
dummy --max-running-requests 32 --speculative off`), and measure it with `--url` while they stand
still.

First the same picture is sent twice. Then streams of text are measured: alone, beside requests with
text, and beside requests with pictures, all different. Times between tokens are those that a client
sees over HTTP, of all streams together, from their 16th token on.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
from PIL import Image
from servers import served
from tokenizers import AddedToken, Tokenizer

import weft

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
SETTLED = 16  # tokens of each stream before others come
MARK = "<image>"
SPECIALS = (MARK, "<fake_token_around_image>", "<global-img>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<image>{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


class Run(NamedTuple):
    """Streams beside other requests. Times in seconds."""

    gaps_s: list[float]
    others_s: float  # until the last of the others had ended
    first_s: list[float]  # until the first token of each of them


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what pictures cost.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--make", action="store_true", help="write the model, with random weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=600, help="of each stream")
    parser.add_argument("--dtype", default="bfloat16", help="of the server that is started")
    parser.add_argument(
        "--max-slowdown",
        default="2.5",
        help="of the server that is started, as `weft serve` has it",
    )
    parser.add_argument("--url", default="", help="of a server that runs already")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--kinds", default="same,alone,text,pictures", help="what is measured, with commas"
    )
    asked = parser.parse_args()
    if asked.make:
        make(asked.model)
        return
    if asked.url:
        asyncio.run(measure(asked.url, asked))
        return
    options = ["--load-format", "dummy", "--dtype", asked.dtype, "--threads", str(asked.threads)]
    options += ["--max-running-requests", str(asked.streams + asked.requests)]
    # Each token is the same: all of them could be guessed, and would come together.
    options += ["--speculative", "off"]
    options += ["--max-slowdown", asked.max_slowdown]
    with served("serve", str(asked.model), *options) as server:
        asyncio.run(measure(server.url, asked))


async def measure(url: str, asked: argparse.Namespace) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:
        for _ in range(2):  # what is done for the first time takes longer
            await answered(client, [text_part("Warm up"), picture_part()], 4)
        kinds = asked.kinds.split(",")
        if "same" in kinds:
            await twice(client)
            kinds.remove("same")
        runs: dict[str, list[Run]] = {kind: [] for kind in kinds}
        for _ in range(asked.rounds):
            for kind, found in runs.items():
                found.append(await beside(client, kind, asked))
        for kind, found in runs.items():
            words = told([gap for run in found for gap in run.gaps_s])
            if found[0].first_s:
                first_s = statistics.median(np.concatenate([run.first_s for run in found]))
                others_s = statistics.median(run.others_s for run in found)
                words += f"; the others: first token after {first_s:.1f} s, all {others_s:.1f} s"
            print(f"streams beside {kind}: {words}", flush=True)


async def twice(client: httpx.AsyncClient) -> None:
    """The same picture in two requests, and one more behind another text."""
    part = picture_part()
    for name, text in (("first", "What is it?"), ("again", "What is it?"), ("other text", "Well?")):
        before = await num_runs(client)
        content = [text_part(text), part] if name == "other text" else [part, text_part(text)]
        began_s = time.perf_counter()
        usage = await answered(client, content, 1)
        seconds = time.perf_counter() - began_s
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        runs = await num_runs(client) - before
        print(
            f"{name}: {1_000 * seconds:.1f} ms, {cached} of {usage['prompt_tokens']} tokens cached, "
            f"{runs:.0f} runs of the encoder",
            flush=True,
        )


async def num_runs(client: httpx.AsyncClient) -> float:
    await asyncio.sleep(1.5)  # the engine tells its numbers now and then
    text = (await client.get("/metrics")).text
    found = re.search(r"^weft:encoder_runs_total\S* (\S+)$", text, re.MULTILINE)
    assert found is not None
    return float(found[1])


async def beside(client: httpx.AsyncClient, kind: str, asked: argparse.Namespace) -> Run:
    """Streams, and beside them what `kind` says."""
    settled = [asyncio.Event() for _ in range(asked.streams)]
    streams = []
    for event in settled:
        content = [text_part(words(20))]
        streams.append(asyncio.create_task(streamed(client, content, asked.tokens, event)))
    for event in settled:
        await event.wait()
    began_s = time.perf_counter()
    others = []
    for _ in range(asked.requests if kind != "alone" else 0):
        content = [text_part(words(64) if kind == "text" else words(4))]
        if kind == "pictures":
            content.append(picture_part())
        others.append(asyncio.create_task(streamed(client, content, 16, asyncio.Event())))
    gaps: list[float] = []
    for one in await asyncio.gather(*streams):
        gaps += np.diff(one[SETTLED:]).tolist()
    print(f"a round beside {kind}: {told(gaps)}", flush=True)
    times = await asyncio.gather(*others)
    others_s = time.perf_counter() - began_s
    return Run(gaps, others_s, [one[0] - began_s for one in times])


def told(gaps_s: list[float]) -> str:
    p50, p99 = np.percentile(1_000 * np.array(gaps_s), [50, 99])
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {1_000 * max(gaps_s):.0f}"


async def streamed(
    client: httpx.AsyncClient, content: list[dict[str, Any]], count: int, settled: asyncio.Event
) -> list[float]:
    """When each token came."""
    times: list[float] = []
    async with client.stream(
        "POST", "/v1/chat/completions", json=body(content, count, True)
    ) as got:
        async for line in got.aiter_lines():
            if line.startswith('data: {"') and '"content":"' in line and '"content":""' not in line:
                times.append(time.perf_counter())
                if len(times) == SETTLED:
                    settled.set()
    return times


async def answered(
    client: httpx.AsyncClient, content: list[dict[str, Any]], count: int
) -> dict[str, Any]:
    reply = await client.post("/v1/chat/completions", json=body(content, count, False))
    reply.raise_for_status()
    return dict(reply.json()["usage"])


def body(content: list[dict[str, Any]], count: int, stream: bool) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": count,
        "ignore_eos": True,
        "temperature": 0,
        # Random weights say what is no text, which is held back; so each token is the same word.
        "logit_bias": {str(WORD): 100},
        "stream": stream,
    }


RNG = np.random.default_rng(0)
WORD = Tokenizer.from_file(str(NANO / "tokenizer.json")).encode(" a").ids[0]


def words(count: int) -> str:
    return " ".join(str(number) for number in RNG.integers(0, 10, count))


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def picture_part() -> dict[str, Any]:
    """A picture that nobody has seen."""
    small = RNG.integers(0, 256, (16, 16, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(small).resize((512, 512)).save(file, "JPEG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def make(folder: Path) -> None:
    """A folder in the shape of SmolVLM-256M, without weights: `--load-format dummy` makes them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIALS])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = {
        "model_type": "llama",
        "vocab_size": 49_280,
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8_192,
    }
    vision = {
        "hidden_size": 768,
        "intermediate_size": 3_072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "image_size": 512,
        "patch_size": 16,
    }
    config = {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "text_config": text,
        "vision_config": vision,
        "scale_factor": 4,
        "image_token_id": tokenizer.token_to_id(MARK),
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    pictures = {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 512},
        "max_image_size": {"longest_edge": 512},
        "do_image_splitting": True,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_pad": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "resample": 1,
    }
    for name, content in (
        ("config.json", config),
        ("preprocessor_config.json", pictures),
        ("processor_config.json", {"image_seq_len": 64}),
        ("tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2))


if __name__ == "__main__":
    main()
