"""What a decode step of one request costs a model whose layers keep states, beside what its memory allows.

    python benchmarks/states.py [--quantize int8] [--profile]

The shape is that of Qwen3.5-0.8B, with random weights: of 24 layers 18 keep a state by the gated delta rule, and 6 have
attention. A step has to read all weights, and to read and write the states; how fast this machine reads is measured in
turns with the steps, by a loop that does nothing else. `--profile`: milliseconds of a step, and of a prompt, by kind of
operation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import numpy as np
from attention import ReadLoop, seconds
from torch import Tensor

from weft.assemble.build import build_engine
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.resolve import resolve
from weft.engine.engine import Engine
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.ops.cpp.library import load
from weft.ops.cpp.timing import Span, Timings
from weft.ops.cpp.weight_memory import WeightMemory

PROMPT_LEN = 64
OUTPUT_LEN = 48
LONG_PROMPT = 512
EDGE = 4  # steps at both ends of a round that are no decode steps
LOOP_BYTES = 384 << 20
VOCAB = 248_320
SHAPE = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "vocab_size": VOCAB,
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000_000,
        "partial_rotary_factor": 0.25,
    },
    "attn_output_gate": True,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
}
NUM_STATE_LAYERS = 18
DELTA_BYTES = 4 * 16 * 128 * 128
CONV_BYTES = 4 * 3 * 3 * 16 * 128


class CountedMemory(WeightMemory):
    """Counts the bytes of packed weights."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def zeros(self, num_bytes: int) -> Tensor:
        self.num_bytes += num_bytes
        return super().zeros(num_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quantize", default="", help="int8 or int4")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--shape", type=Path, help="write a folder with config.json, and end")
    options = parser.parse_args()
    if options.shape is not None:
        options.shape.mkdir(parents=True, exist_ok=True)
        (options.shape / "config.json").write_text(json.dumps(SHAPE))
        return
    memory = CountedMemory()
    load("").memory = memory  # as the engine asks for it
    engine = built(options.quantize)
    num_bytes = memory.num_bytes
    num_state = 2 * NUM_STATE_LAYERS * (DELTA_BYTES + CONV_BYTES)
    print(f"weights {num_bytes / 1e6:.0f} MB, states {num_state / 1e6:.0f} MB read and written")
    loop = ReadLoop(LOOP_BYTES, 2)
    shares = []
    for number in range(options.rounds):
        reads = [seconds(loop.run) for _ in range(5)]
        rate = LOOP_BYTES / statistics.median(reads)
        step_s = statistics.median(decode(engine, number))
        share = (num_bytes + num_state) / rate / step_s
        shares.append(share)
        print(
            f"step {1e3 * step_s:.2f} ms, read loop {rate / 1e9:.1f} GB/s: {share:.2f}", flush=True
        )
    print(f"of the memory bound: median {statistics.median(shares[1:]):.2f}")
    if options.profile:
        profile(engine, options.rounds)


def built(quantize: str) -> Engine:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPE))
        asked = EngineConfig(
            model=name,
            load_format="dummy",
            device="cpu",
            threads=2,
            quantize=quantize,
            kv_tokens=8_192,
            max_running_requests=4,
            speculative="off",
        )
        config = resolve(asked, ModelConfig.from_folder(folder), probe()).config
        return build_engine(config, folder).engine


def decode(
    engine: Engine, number: int, *, prompt_len: int = PROMPT_LEN, output_len: int = OUTPUT_LEN
) -> list[float]:
    """Seconds of each decode step of one request."""
    random = np.random.default_rng(number)
    ids = random.integers(0, VOCAB, prompt_len).astype(np.int32).tobytes()
    sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
    engine.submit(GenerateRequest(id=number, rid=str(number), input_ids=ids, sampling=sampling))
    steps = []
    while engine.has_work:
        began = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - began)
    return steps[EDGE:-EDGE]


def profile(engine: Engine, number: int) -> None:
    """Print which operations a decode step of another request spends its time in, and then a prompt."""
    library = load("")
    library.timings = Timings()
    num_steps = len(decode(engine, number)) + 2 * EDGE
    tell(library.timings.spans(), num_steps)
    library.timings = Timings()
    began = time.perf_counter()
    decode(engine, number + 1, prompt_len=LONG_PROMPT, output_len=1)
    print(f"a prompt of {LONG_PROMPT} tokens: {1e3 * (time.perf_counter() - began):.0f} ms")
    tell(library.timings.spans(), 1)
    library.timings = None


def tell(spans: list[Span], num_steps: int) -> None:
    times_ms = Counter[str]()
    calls = Counter[str]()
    for span in spans:
        times_ms[span.name] += span.took_ns / 1e6
        calls[span.name] += 1
    for name, total in times_ms.most_common():
        print(f"{total / num_steps:8.3f} ms  {calls[name] / num_steps:6.1f} times  {name}")


if __name__ == "__main__":
    main()
