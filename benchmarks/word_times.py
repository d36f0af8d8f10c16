"""Times of words beside transformers: random weights in the shape of whisper-tiny or whisper-base,
sounds of several lengths, over HTTP.

    python benchmarks/word_times.py
    python benchmarks/word_times.py --models 1 --seconds 30 --dtype bfloat16
    python benchmarks/word_times.py --shape base --languages ja th --silent
    python benchmarks/word_times.py --free --pieces 46161

Both write tokens by the greedy choice, with times. The positions of the decoder say which: words in
many scripts, marks and times, drawn at random for each model. So both write the same ones, many of
them, in bfloat16, too; with `--free`, random weights alone choose. A word of transformers is what its
`_combine_tokens_into_words` makes of the tokens of a segment, from the time of the token before it
to that of its last one. Compared are sounds whose tokens are the same, as far as both go; words must
have the same text. `--spread`: how large weights are; the larger, the less evenly a model with random weights
attends to the sound. The vocabulary is that of weft-nano, `--pieces` of words in many scripts (with
parts of characters among them), and the tokens of Whisper.
"""

from __future__ import annotations

import argparse
import json
import random
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
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.whisper import tokenization_whisper

WINDOW_S = 30
MAX_TIME = 50 * WINDOW_S - 10  # steps of 0.02 s
NUM_NANO = 4_096  # tokens of weft-nano: all ids below that of the end are text
NUM_WRITTEN = 160
PROMPT_LEN = 3  # begin, language, task
SAYS = 400.0  # how much larger than the rest of a position the token is that follows it
LANGUAGES = ("en", "de", "ru", "ar", "zh", "ja", "th")
NAMES = (
    "<|endofspeech|>",
    "<|startoftranscript|>",
    *(f"<|{code}|>" for code in LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|reserved|>",
    "<|notimestamps|>",
    *(f"<|{0.02 * place:.2f}|>" for place in range(50 * WINDOW_S + 1)),
)
FIRST_TIME = NAMES.index("<|0.00|>")
MARKS = (",", ".", "?", "!", " (", ")", ' "', '"', "-", " -", "...", "。", "、", "¿", " ")
MARK_SHARE = 0.15  # of the pieces
# The first and the last character of scripts.
SCRIPTS = (
    (0x00C0, 0x024F),
    (0x0391, 0x03C9),
    (0x0400, 0x045F),
    (0x05D0, 0x05EA),
    (0x0621, 0x064A),
    (0x0904, 0x0939),
    (0x0E01, 0x0E30),
    (0x3041, 0x3096),
    (0x4E00, 0x9FFF),
    (0xAC00, 0xD7A3),
    (0x1F300, 0x1F5FF),
)
LIMITS_S = (0.02, 0.04)
SLACK_S = 1e-3  # times are written with two digits


class SpokenWord(NamedTuple):
    text: str
    start_s: float
    end_s: float


class Shape(NamedTuple):
    num_layers: int  # of the encoder, and of the decoder
    size: int
    num_heads: int
    alignment_heads: list[list[int]]  # as many as the model of this shape names


SHAPES = {
    "tiny": Shape(4, 384, 6, [[2, 2], [3, 0], [3, 2], [3, 3], [3, 4], [3, 5]]),
    "base": Shape(6, 512, 8, [[3, 1], [4, 2], [4, 3], [4, 7], [5, 1], [5, 2], [5, 4], [5, 6]]),
}


class Made(NamedTuple):
    model: Any
    tokenizer: Any
    extractor: Any
    end: int  # the token


class Spelling:
    """What `_combine_tokens_into_words` asks of a tokenizer."""

    def __init__(self, made: Made, language: str) -> None:
        self._tokenizer = made.tokenizer
        self.eos_token_id = made.end
        self.language = language

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times of words beside transformers.")
    parser.add_argument("--models", type=int, default=4, help="how many, with other weights")
    parser.add_argument("--seconds", type=float, nargs="*", default=[2.0, 7.3, 15.0, 30.0, 50.0])
    parser.add_argument("--languages", nargs="*", choices=LANGUAGES, default=["en", "zh"])
    parser.add_argument("--shape", default="tiny", choices=SHAPES)
    parser.add_argument("--pieces", type=int, default=3_000, help="tokens in many scripts")
    parser.add_argument("--free", action="store_true", help="the weights choose the tokens")
    parser.add_argument("--silent", action="store_true", help="sounds are silence")
    parser.add_argument("--spread", type=float, default=1.5)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument(
        "--reference", default="", choices=("float32", "bfloat16"), help="--dtype of transformers"
    )
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    print("model | sound | language | words | within 20 ms | within 40 ms | longest, s")
    differences: list[float] = []
    for seed in range(asked.models):
        with tempfile.TemporaryDirectory() as folder:
            shape = SHAPES[asked.shape]
            script = [] if asked.free else written(seed, NUM_NANO, asked.pieces)
            made = make(Path(folder), seed, shape, asked, script)
            options = ("--dtype", asked.dtype, "--threads", str(asked.threads))
            with served("serve", folder, *options, "--max-running-requests", "2") as server:
                for seconds in asked.seconds:
                    for language in asked.languages:
                        samples = sound(int(seconds * RATE) + seed) * (not asked.silent)
                        head = f"{seed} | {seconds:g} s | {language}"
                        differences += compare(made, server.url, head, samples, language)
    print(f"all | | | {told(differences)}")


def compare(made: Made, url: str, head: str, samples: Any, language: str) -> list[float]:
    """The differences of all times of a sound, in seconds."""
    file = wav(samples)
    answer = asked_of_weft(url, file, language)
    segments = by_transformers(made, file, language)
    own = [id for one in answer["segments"] for id in one["tokens"] if id < made.end]
    wanted = [int(id) for one in segments for id in one["tokens"] if int(id) < made.end]
    shorter = min(len(own), len(wanted))
    if own[:shorter] != wanted[:shorter]:
        print(f"{head} | other tokens", flush=True)
        return []
    words = [SpokenWord(one["word"], one["start"], one["end"]) for one in answer["words"]]
    theirs = words_of(segments, Spelling(made, language_name(language)))
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
            if int(id) < spelling.eos_token_id:
                ids.append(int(id))
                spans.append((before_s, end_s))
            before_s = end_s
        if not ids:
            continue
        made = tokenization_whisper._combine_tokens_into_words(spelling, ids, spelling.language)
        for text, _, places in zip(*made, strict=True):
            found.append(SpokenWord(text, spans[places[0]][0], spans[places[-1]][1]))
    return found


def vocabulary(num_pieces: int) -> Tokenizer:
    """That of weft-nano with so many pieces of words, of which every fourth may end in a part of a
    character."""
    draw = random.Random(1)
    letters = bytes_to_unicode()
    content = json.loads((NANO / "tokenizer.json").read_text())
    known: dict[str, int] = content["model"]["vocab"]
    while len(known) < NUM_NANO + num_pieces:
        first, last = draw.choice(SCRIPTS)
        text = draw.choice(("", " ", " "))
        text += "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 3)))
        if draw.random() < MARK_SHARE:
            text = draw.choice(MARKS) * draw.randint(1, 2)
        data = text.encode()
        if draw.random() < 0.25:
            data = data[: draw.randint(1, len(data))]
        known.setdefault("".join(letters[byte] for byte in data), len(known))
    return Tokenizer.from_str(json.dumps(content))


def written(seed: int, first: int, num_pieces: int) -> list[int]:
    """The tokens that a model writes: pieces and marks in segments of up to four seconds."""
    draw = random.Random(seed)
    end = first + num_pieces
    found: list[int] = []
    time = draw.randint(0, 40)
    while len(found) < NUM_WRITTEN and time < MAX_TIME:
        found.append(end + FIRST_TIME + time)
        found += [draw.randrange(first, end) for _ in range(draw.randint(1, 14))]
        time += draw.randint(20, 200)
        found.append(end + FIRST_TIME + min(time, MAX_TIME))
    return [*found, end]


def make(
    folder: Path, seed: int, shape: Shape, asked: argparse.Namespace, script: Sequence[int]
) -> Made:
    """The folder gets all files of a checkpoint."""
    torch.manual_seed(seed)
    num_pieces: int = asked.pieces
    end = NUM_NANO + num_pieces
    first_time = end + FIRST_TIME
    layers = dict.fromkeys(("encoder_layers", "decoder_layers"), shape.num_layers)
    inner = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4 * shape.size)
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), shape.num_heads)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end)
    config = transformers.WhisperConfig(
        d_model=shape.size,
        **layers,
        **inner,
        **heads,
        **ends,
        vocab_size=end + len(NAMES),
        decoder_start_token_id=end + 1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        attn_implementation="eager",
    )
    model = transformers.WhisperForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name and parameter.dim() > 1:
                parameter.normal_(std=asked.spread * parameter[0].numel() ** -0.5)
        decoder = model.model.decoder
        positions = decoder.embed_positions.weight[PROMPT_LEN - 1 :][: len(script)]
        positions += SAYS * decoder.embed_tokens.weight[list(script)]
    model.generation_config = transformers.GenerationConfig(
        **ends,
        decoder_start_token_id=end + 1,
        is_multilingual=True,
        lang_to_id={f"<|{code}|>": end + NAMES.index(f"<|{code}|>") for code in LANGUAGES},
        task_to_id={task: end + NAMES.index(f"<|{task}|>") for task in ("transcribe", "translate")},
        no_timestamps_token_id=first_time - 1,
        prev_sot_token_id=end + NAMES.index("<|startofprev|>"),
        max_initial_timestamp_index=50,
        max_length=448,
        suppress_tokens=list(range(end + 1, first_time)),
        begin_suppress_tokens=[end],
        alignment_heads=shape.alignment_heads,
        return_timestamps=False,
    )
    backend = vocabulary(num_pieces)
    backend.add_special_tokens([AddedToken(name, special=True) for name in NAMES])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=NAMES[0], eos_token=NAMES[0], pad_token=NAMES[0]
    )
    extractor = transformers.WhisperFeatureExtractor()
    model.to(getattr(torch, asked.dtype))
    for part in (model, tokenizer, extractor):
        part.save_pretrained(folder)
    # With the weights that are in the file.
    model.to(getattr(torch, asked.reference or asked.dtype))
    return Made(model, tokenizer, extractor, end)


if __name__ == "__main__":
    main()
