"""Speech to text beside transformers: the same random weights in the shape of whisper-tiny, both in
turns, from the bytes of a WAV file to the last token.

    python benchmarks/speech.py                                  # clips of 5, 10, 15 and 30 s
    python benchmarks/speech.py --seconds 5 --dtype bfloat16 --threads 1 --rounds 9

Both write the same number of tokens, 2.5 for each second, by the greedy choice. Given are the least
seconds of all rounds, on the clock and of the processor. With one thread no thread waits in a loop,
so processor time says what the work takes, also on a machine on which others work. transformers
computes with `sdpa`, its default.
"""

from __future__ import annotations

import argparse
import gc
import io
import tempfile
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from tokenizers import AddedToken, Tokenizer

import weft
from weft import LLM, SamplingParams

NANO = Path(weft.__file__).parent / "bundled" / "weft-nano"
RATE = 16_000
TOKENS_PER_S = 2.5  # of English speech
VOCAB = 51_865
BEGIN = 4_096  # the first id after those of weft-nano, whose tokenizer is taken
PROMPT = (BEGIN, 50_259, 50_359, 50_363)  # English, transcribe, without times
END = 50_257
DTYPES = ("float32", "bfloat16")


class Took(NamedTuple):
    """Seconds."""

    clock: float
    processor: float


class Side(NamedTuple):
    """A program that writes `count` tokens about the file, and returns them."""

    name: str
    write: Callable[[bytes, int], list[int]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech to text beside transformers.")
    parser.add_argument("--seconds", type=float, nargs="*", default=[5.0, 10.0, 15.0, 30.0])
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quantize-encoder", default="none", help="as `weft serve` has it")
    parser.add_argument("--quantize", default="none", help="as `weft serve` has it")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder:
        model, extractor = made(Path(folder))
        sides = []
        for dtype in asked.dtype:
            sides.append(of_transformers(model, extractor, dtype))
            sides.append(of_weft(folder, dtype, asked))
        print("clip | program | clock, s | processor, s | tokens as in float32 of transformers")
        for seconds in asked.seconds:
            measure(sides, seconds, asked.rounds)


def measure(sides: list[Side], seconds: float, rounds: int) -> None:
    file = wav(sound(int(seconds * RATE)))
    count = round(TOKENS_PER_S * seconds)
    tokens = [side.write(file, count) for side in sides]
    times: list[list[Took]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, own in zip(sides, times, strict=True):
            gc.collect()
            own.append(timed(side, file, count))
    for side, own, written in zip(sides, times, tokens, strict=True):
        same = sum(a == b for a, b in zip(written, tokens[0], strict=True))
        clock = min(one.clock for one in own)
        processor = min(one.processor for one in own)
        line = f"{seconds:g} s | {side.name} | {clock:.3f} | {processor:.3f} | {same} of {count}"
        print(line, flush=True)


def timed(side: Side, file: bytes, count: int) -> Took:
    began = (time.perf_counter(), time.process_time())
    side.write(file, count)
    return Took(time.perf_counter() - began[0], time.process_time() - began[1])


def of_weft(folder: str, dtype: str, asked: argparse.Namespace) -> Side:
    llm = LLM(
        folder,
        dtype=dtype,
        threads=asked.threads,
        quantize=asked.quantize,
        quantize_encoder=asked.quantize_encoder,
        encoder_cache_tokens=1_500,
        max_running_requests=4,
        # Random weights repeat themselves, and what repeats itself is guessed.
        speculative="off",
    )
    number = 0

    def write(file: bytes, count: int) -> list[int]:
        nonlocal number
        number += 1
        # One sample differs, so that nothing is known from the call before.
        file = file[:-2] + number.to_bytes(2, "little")
        params = SamplingParams(max_new_tokens=count, temperature=0.0, ignore_eos=True)
        (output,) = llm.generate([{"prompt": list(PROMPT), "audios": [file]}], params)
        return output.token_ids

    return Side(f"weft, {dtype}", write)


def of_transformers(model: Any, extractor: Any, dtype: str) -> Side:
    own = transformers.WhisperForConditionalGeneration(model.config).eval()
    own.load_state_dict(model.state_dict())
    own.generation_config = model.generation_config
    own.to(getattr(torch, dtype))

    def write(file: bytes, count: int) -> list[int]:
        with wave.open(io.BytesIO(file)) as reader:
            whole = np.frombuffer(reader.readframes(reader.getnframes()), "<i2")
        samples = whole.astype(np.float32) / 32_768
        made = extractor(samples, sampling_rate=RATE, return_tensors="pt")
        with torch.inference_mode():
            found = own.generate(
                made.input_features.to(own.dtype),
                decoder_input_ids=torch.tensor([PROMPT]),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=False,
            )
        return [int(token) for token in found[0].tolist()[-count:]]

    return Side(f"transformers, {dtype}", write)


def made(folder: Path) -> tuple[Any, Any]:
    """transformers' model and its extractor of features; the folder gets all files of a
    checkpoint."""
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        d_model=384,
        encoder_layers=4,
        decoder_layers=4,
        encoder_attention_heads=6,
        decoder_attention_heads=6,
        encoder_ffn_dim=1_536,
        decoder_ffn_dim=1_536,
        vocab_size=VOCAB,
        eos_token_id=END,
        bos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=BEGIN,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=END, pad_token_id=END, decoder_start_token_id=BEGIN, is_multilingual=False
    )
    tokenizer = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken("<|startoftranscript|>", special=True)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    extractor = transformers.WhisperFeatureExtractor()
    for part in (model, fast, extractor):
        part.save_pretrained(folder)
    return model, extractor


def sound(length: int) -> Any:
    """Samples of a voice that changes with time."""
    rng = np.random.default_rng(length)
    times = np.arange(length) / RATE
    pitch = 200 + 150 * np.sin(2 * np.pi * 1.3 * times)
    tone = np.sin(2 * np.pi * np.cumsum(pitch) / RATE)
    loudness = 0.3 + 0.3 * np.sin(2 * np.pi * 2.1 * times)
    return loudness * tone + 0.02 * rng.standard_normal(length)


def wav(samples: Any) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(np.round(np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes())
    return file.getvalue()


if __name__ == "__main__":
    main()
