"""Times of words beside transformers: random weights in the shape of whisper-tiny, sounds of several
lengths, over HTTP.

    python benchmarks/word_times.py
    python benchmarks/word_times.py --models 1 --seconds 30 --dtype bfloat16 --spread 3

Both write tokens by the greedy choice, with times. A word of transformers is what its
`_combine_tokens_into_words` makes of the tokens of a segment, from the time of the token before it
to that of its last one. Compared are sounds whose tokens are the same, as far as both go; words must
have the same text. `--spread`: how large weights are; the larger, the less evenly a model with random weights
attends to the sound. The vocabulary is that of weft-nano and the tokens of Whisper.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch
import transformers
from servers import served
from speech import NANO, RATE, sound, wav
from tokenizers import AddedToken, Tokenizer
from transformers.models.whisper import tokenization_whisper

WINDOW_S = 30
END = 4_096  # all ids below it are text
FIRST_TIME = END + 12
NAMES = (
    "<|endofspeech|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|zh|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|reserved|>",
    "<|notimestamps|>",
    *(f"<|{0.02 * place:.2f}|>" for place in range(50 * WINDOW_S + 1)),
)
LANGUAGES = ("en", "de", "zh")
LIMITS_S = (0.02, 0.04)
SLACK_S = 1e-3  # times are written with two digits


class SpokenWord(NamedTuple):
    text: str
    start_s: float
    end_s: float


class Made(NamedTuple):
    model: Any
    tokenizer: Any
    extractor: Any


class Spelling:
    """What `_combine_tokens_into_words` asks of a tokenizer."""

    eos_token_id = END

    def __init__(self, tokenizer: Any, language: str) -> None:
        self._tokenizer = tokenizer
        self.language = language

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of words beside transformers.")
    parser.add_argument("--models", type=int, default=4, help="how many, with other weights")
    parser.add_argument("--seconds", type=float, nargs="*", default=[2.0, 7.3, 15.0, 30.0, 50.0])
    parser.add_argument("--languages", nargs="*", choices=LANGUAGES, default=["en", "zh"])
    parser.add_argument("--spread", type=float, default=1.5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    print("model | sound | language | words | within 20 ms | within 40 ms | longest, s")
    differences: list[float] = []
    for seed in range(asked.models):
        with tempfile.TemporaryDirectory() as folder:
            made = make(Path(folder), seed, asked.spread, asked.dtype)
            options = ("--dtype", asked.dtype, "--threads", str(asked.threads))
            with served("serve", folder, *options, "--max-running-requests", "2") as server:
                for seconds in asked.seconds:
                    for language in asked.languages:
                        differences += compare(made, server.url, seed, seconds, language)
    print(f"all | | | {told(differences)}")


def compare(made: Made, url: str, seed: int, seconds: float, language: str) -> list[float]:
    """The differences of all times of a sound, in seconds."""
    file = wav(sound(int(seconds * RATE) + seed))
    answer = asked_of_weft(url, file, language)
    segments = by_transformers(made, file, language)
    head = f"{seed} | {seconds:g} s | {language}"
    own = [id for one in answer["segments"] for id in one["tokens"] if id < END]
    wanted = [int(id) for one in segments for id in one["tokens"] if int(id) < END]
    shorter = min(len(own), len(wanted))
    if own[:shorter] != wanted[:shorter]:
        print(f"{head} | other tokens", flush=True)
        return []
    words = [SpokenWord(one["word"], one["start"], one["end"]) for one in answer["words"]]
    theirs = words_of(segments, Spelling(made.tokenizer, language_name(language)))
    # A model with random weights writes times after the end of the sound, where both stop in their
    # own way.
    count = min(len(words), len(theirs)) - (len(own) != len(wanted))
    words, theirs = words[:count], theirs[:count]
    if [one.text.strip() for one in words] != [one.text.strip() for one in theirs]:
        print(f"{head} | other words", flush=True)
        return []
    found = []
    for mine, there in zip(words, theirs, strict=True):
        found += [abs(mine.start_s - there.start_s), abs(mine.end_s - there.end_s)]
    print(f"{head} | {told(found)}", flush=True)
    return found


def told(differences: list[float]) -> str:
    if not differences:
        return "0 words"
    shares = [np.mean([one <= limit + SLACK_S for one in differences]) for limit in LIMITS_S]
    parts = [f"{share:.2%}" for share in shares]
    return " | ".join([str(len(differences) // 2), *parts, f"{max(differences):.2f}"])


def language_name(code: str) -> str:
    return tokenization_whisper.LANGUAGES[code]


def asked_of_weft(url: str, file: bytes, language: str) -> Any:
    fields = {
        "language": language,
        "temperature": "0",
        "response_format": "verbose_json",
        "timestamp_granularities[]": ["word", "segment"],
    }
    address = f"{url}/v1/audio/transcriptions"
    answer = httpx.post(address, files={"file": file}, data=fields, timeout=600)
    answer.raise_for_status()
    return answer.json()


def by_transformers(made: Made, file: bytes, language: str) -> list[Any]:
    samples = np.frombuffer(file[44:], "<i2").astype(np.float32) / 32_768
    is_long = len(samples) > WINDOW_S * RATE
    features = made.extractor(
        samples,
        sampling_rate=RATE,
        return_tensors="pt",
        truncation=False,
        padding="longest" if is_long else "max_length",
        return_attention_mask=True,
    )
    with torch.inference_mode():
        found = made.model.generate(
            features.input_features.to(made.model.dtype),
            attention_mask=features.attention_mask,
            language=language,
            task="transcribe",
            do_sample=False,
            return_timestamps=True,
            return_token_timestamps=True,
            return_segments=True,
            condition_on_prev_tokens=True,
        )
    segments: list[Any] = found["segments"][0]
    return segments


def words_of(segments: list[Any], spelling: Spelling) -> list[SpokenWord]:
    """As transformers' pipeline for speech makes them of segments."""
    found = []
    before_s = 0.0
    for segment in segments:
        ids = []
        spans = []
        for id, time in zip(segment["tokens"], segment["token_timestamps"], strict=True):
            end_s = round(float(time), 2)
            if int(id) < END:
                ids.append(int(id))
                spans.append((before_s, end_s))
            before_s = end_s
        if not ids:
            continue
        made = tokenization_whisper._combine_tokens_into_words(spelling, ids, spelling.language)
        for text, _, places in zip(*made, strict=True):
            found.append(SpokenWord(text, spans[places[0]][0], spans[places[-1]][1]))
    return found


def make(folder: Path, seed: int, spread: float, dtype: str) -> Made:
    """The folder gets all files of a checkpoint."""
    torch.manual_seed(seed)
    size = {"d_model": 384, "encoder_layers": 4, "decoder_layers": 4}
    inner = {"encoder_ffn_dim": 1_536, "decoder_ffn_dim": 1_536}
    heads = {"encoder_attention_heads": 6, "decoder_attention_heads": 6}
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), END)
    config = transformers.WhisperConfig(
        **size,
        **inner,
        **heads,
        **ends,
        vocab_size=END + len(NAMES),
        decoder_start_token_id=END + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation="eager",
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.normal_(std=spread * parameter[0].numel() ** -0.5)
    model.generation_config = transformers.GenerationConfig(
        **ends,
        decoder_start_token_id=END + 1,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": END + NAMES.index(f"<|{code}|>") for code in LANGUAGES},
        task_to_id={task: END + NAMES.index(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=FIRST_TIME - 1,
        prev_sot_token_id=END + NAMES.index("<|startofprev|>"),
        max_initial_timestamp_index=50,
        max_length=448,
        suppress_tokens=list(range(END + 1, FIRST_TIME)),
        begin_suppress_tokens=[END],
        # As many as whisper-tiny names.
        alignment_heads=[[2, 2], [3, 0], [3, 2], [3, 3], [3, 4], [3, 5]],
        return_timestamps=False,
    )
    backend = Tokenizer.from_file(str(NANO / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=NAMES[0], eos_token=NAMES[0], pad_token=NAMES[0]
    )
    extractor = transformers.WhisperFeatureExtractor()
    model.to(getattr(torch, dtype))
    for part in (model, tokenizer, extractor):
        part.save_pretrained(folder)
    return Made(model, tokenizer, extractor)


if __name__ == "__main__":
    main()
