"""`weft bench quality`: the cost of fewer bits. Two models, or one model in two dtypes, read the
same text, and the benchmark compares their probabilities of every next token.

    text ─▶ tokens ─▶ the engine, twice ─▶ log p of all tokens at every position ─▶ figures

The text is that of Python's standard library, which is the same on every machine with the same
Python and needs no download. This module knows no kernels: a runner computes, as for a server.
"""

from __future__ import annotations

import argparse
import difflib
import heapq
import inspect
import math
import statistics
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from weft.arrays import FloatArray, IntArray
from weft.assemble.checkpoint import check_files
from weft.assemble.model_config import choose_model
from weft.assemble.model_folder import model_folder
from weft.bench.results import write_json
from weft.bench.testbed import with_model
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.options import Settings, SettingsError, option
from weft.config.resolve import resolve
from weft.plan.outputs import PromptLogprobs, PromptLogprobsRequest
from weft.plan.step import ForwardMode, Plan, Sampling, find
from weft.sim.table import table
from weft.text.tokenizer import Tokenizer

CHUNK_LEN = 128  # positions for which the log probabilities of all tokens are in memory
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class QualityOptions:
    against: str = option(
        "float32",
        "what the model is compared with: itself in float32, bfloat16 or float16, or another model "
        "with the same tokenizer",
        group="bench",
        everyday=True,
    )
    texts: int = option(
        32, "how many texts of the standard library are read", group="bench", everyday=True, low=2
    )
    text_len: int = option(512, "tokens of each", group="bench", low=2)
    json: str = option(
        "",
        "file for the figures as JSON",
        group="bench",
        everyday=True,
        judge="weft.config.outputs:wrong_file",
    )


class Quality(NamedTuple):
    """The probabilities of a model on a text, compared with those of another model."""

    perplexity: float
    perplexity_against: float  # of the other model
    change: float  # relative change of the perplexity
    change_error: float  # standard error of `change` over texts
    divergence: float  # mean Kullback-Leibler divergence from the other model, nats
    same_token: float  # share of positions where both have the same likeliest token


class TextFigures(NamedTuple):
    """Sums over the positions of one text."""

    num: int
    loss: float  # nats
    loss_against: float
    divergence: float
    same: int

    def plus(self, more: TextFigures) -> TextFigures:
        return TextFigures(
            num=self.num + more.num,
            loss=self.loss + more.loss,
            loss_against=self.loss_against + more.loss_against,
            divergence=self.divergence + more.divergence,
            same=self.same + more.same,
        )


def bench_quality(settings: Settings) -> int:
    options = settings.make(QualityOptions)
    config = with_model(settings.make(EngineConfig))
    against = other_config(config, options.against)
    ours = Reader(config, options.text_len)
    theirs = Reader(against, options.text_len)
    try:
        if ours.vocab_size != theirs.vocab_size:
            raise SettingsError(
                f"--against {options.against} has a vocabulary of {theirs.vocab_size:,} tokens, "
                f"the model one of {ours.vocab_size:,}"
            )
        texts = read_texts(ours.tokenizer, options.texts, options.text_len)
        quality = compare(ours, theirs, texts)
    finally:
        ours.close()
        theirs.close()
    print(f"{ours.summary} against {theirs.summary}: {texts.size:,} tokens of text")
    print(_quality_table(quality))
    facts = {"model": ours.summary, "against": theirs.summary, "tokens": int(texts.size)}
    write_json(options.json, "quality", facts, quality._asdict())
    return 0


def other_config(config: EngineConfig, against: str) -> EngineConfig:
    """The settings of the model to compare with. Its weights keep all stored bits, and its KV has
    the dtype of the model."""
    if against in DTYPES:
        return replace(config, dtype=against, quantize="none", kv_dtype="auto")
    return replace(config, model=against, dtype="auto", quantize="auto", kv_dtype="auto")


class Reader:
    """A loaded model that computes the log probability of every token at each position of a
    text."""

    def __init__(self, config: EngineConfig, text_len: int) -> None:
        """Raises ModelError, and SettingsError for a model that does not generate text."""
        from weft.executor.build import load_runner

        folder = model_folder(config)
        check_files(folder)
        model = choose_model(config, folder)
        if model.pooling is not None or model.is_encoder:
            raise SettingsError(f"{model.name} makes no text: its next tokens cannot be compared")
        if text_len > model.max_position:
            raise SettingsError(
                f"--text-len is {text_len:,}; {model.name} takes {model.max_position:,} tokens"
            )
        resolved = resolve(config, model, probe()).config
        self.vocab_size = model.vocab_size
        self.tokenizer = Tokenizer.load(folder)
        bits = resolved.dtype if resolved.quantize == "none" else resolved.quantize
        self.summary = f"{model.name} in {bits}"
        num_pages = -(-text_len // resolved.page_size)
        self._runner = load_runner(
            resolved,
            model,
            folder=folder,
            kv_tokens=num_pages * resolved.page_size,
            page_size=resolved.page_size,
            max_rows=1,
            context_length=text_len,
        )
        self._every_token = np.arange(self.vocab_size, dtype=np.int32)

    def logprobs(self, tokens: IntArray) -> Iterator[FloatArray]:
        """tokens [n] -> chunks [positions, vocab], over the n - 1 positions between two tokens: the
        log probability of every token there, given the tokens before."""
        positions = len(tokens) - 1
        for start in range(0, positions, CHUNK_LEN):
            num = min(CHUNK_LEN, positions - start)
            request = PromptLogprobsRequest(
                index=np.zeros(1, np.int32),
                counts=np.array([num], np.int32),
                num_top=np.zeros(1, np.int32),
                ids=self._every_token[None],
                places=np.arange(num, dtype=np.int32),
                targets=tokens[start + 1 : start + num + 1],
            )
            plan = _plan(tokens[start : start + num], start, request)
            found = find(self._runner.launch(plan).result().outputs, PromptLogprobs)
            assert found is not None, "it was asked for"
            yield found.id_logprobs

    def close(self) -> None:
        self._runner.close()


def read_texts(tokenizer: Tokenizer, count: int, length: int) -> IntArray:
    """[count, length] tokens, from positions that are evenly spaced over the text of the library.

    Raises SettingsError if the library has less text.
    """
    ids = tokenizer.encode("\n\n".join(library_texts()), add_special_tokens=False)
    if len(ids) < count * length:
        raise SettingsError(
            f"the text of the standard library has {len(ids):,} tokens of this model, "
            f"fewer than {count:,} texts of {length:,}"
        )
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.array([ids[start : start + length] for start in starts], dtype=np.int32)


def library_texts() -> Iterator[str]:
    """Three parts prose (the language reference of `help()`), and one part code."""
    from pydoc_data import topics

    yield from topics.topics.values()
    for module in (argparse, difflib, heapq, statistics, textwrap):
        yield inspect.getsource(module)


def compare(ours: Reader, theirs: Reader, texts: IntArray) -> Quality:
    """Compare both readers text by text, and chunk by chunk, so that the log probabilities of at
    most two chunks are in memory."""
    return _over_texts([_compared(ours, theirs, tokens) for tokens in texts])


def _compared(ours: Reader, theirs: Reader, tokens: IntArray) -> TextFigures:
    total = TextFigures(0, 0.0, 0.0, 0.0, 0)
    for mine, other in zip(ours.logprobs(tokens), theirs.logprobs(tokens), strict=True):
        targets = tokens[total.num + 1 : total.num + len(mine) + 1]
        total = total.plus(_figures(mine, other, targets))
    return total


def _figures(ours: FloatArray, theirs: FloatArray, targets: IntArray) -> TextFigures:
    """The sums for log probabilities [n, vocab] of the same positions, with tokens `targets`
    [n]."""
    positions = np.arange(len(targets))
    divergence = (np.exp(theirs) * (theirs - ours)).sum(axis=1)
    return TextFigures(
        num=len(targets),
        loss=-float(ours[positions, targets].sum(dtype=np.float64)),
        loss_against=-float(theirs[positions, targets].sum(dtype=np.float64)),
        divergence=float(divergence.sum(dtype=np.float64)),
        same=int((ours.argmax(axis=1) == theirs.argmax(axis=1)).sum()),
    )


def _over_texts(figures: list[TextFigures]) -> Quality:
    num = sum(each.num for each in figures)
    loss = sum(each.loss for each in figures) / num
    loss_against = sum(each.loss_against for each in figures) / num
    # Texts differ by far more than two dtypes of one model, so only differences per text count.
    gaps = [(each.loss - each.loss_against) / each.num for each in figures]
    gap = loss - loss_against
    gap_error = float(np.std(gaps, ddof=1)) / math.sqrt(len(gaps))
    return Quality(
        perplexity=math.exp(loss),
        perplexity_against=math.exp(loss_against),
        change=math.expm1(gap),
        change_error=math.exp(gap) * gap_error,
        divergence=sum(each.divergence for each in figures) / num,
        same_token=sum(each.same for each in figures) / num,
    )


def _plan(tokens: IntArray, start: int, request: PromptLogprobsRequest) -> Plan:
    """A step that computes the tokens of a text from position `start` on, and samples nothing. The
    slot of a token is its position."""
    num = len(tokens)
    return Plan(
        step=0,
        mode=ForwardMode.EXTEND,
        rows=np.zeros(1, np.int32),
        starts=np.array([start], np.int32),
        lens=np.array([num], np.int32),
        tokens=tokens,
        slots=np.arange(start, start + num, dtype=np.int32),
        samples=np.zeros(1, np.bool_),
        sampling=Sampling.greedy(),
        outputs=(request,),
    )


def _quality_table(quality: Quality) -> str:
    header = ["perplexity", "against", "change", "+-", "KL, nats", "same likeliest token"]
    row = [
        f"{quality.perplexity:.4f}",
        f"{quality.perplexity_against:.4f}",
        f"{quality.change:+.2%}",
        f"{quality.change_error:.2%}",
        f"{quality.divergence:.5f}",
        f"{quality.same_token:.2%}",
    ]
    return table(header, [row])
