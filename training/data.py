"""Token streams and the batches cut from them. Which tokens row number n of a training run holds depends on n and the
length of a row alone, so a resumed run needs no other state than its row counter. Knows nothing about models.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import conversations, render
from training.corpus import Document
from training.tokenizer import END_OF_TEXT_ID

Tokens = NDArray[np.uint16]

SEED = 1234
CHAT_FRACTION = 0.15  # of all rows
CONVERSATIONS_PER_DEFINITION = 2
BARE_LINE_BREAKS_EVERY = 4  # texts


class Stream(NamedTuple):
    """Texts one after the other, each followed by <|endoftext|>."""

    tokens: Tokens  # [N]
    starts: NDArray[np.int64]  # [texts] where each text begins
    num_bytes: int  # of all texts in UTF-8


class Corpus(NamedTuple):
    code: Stream
    chat: Stream


def encode(tokenizer: Tokenizer, texts: list[str], bare_every: int = 0) -> Stream:
    """The texts as a stream; in every `bare_every`-th one (0: in none), line breaks are apart from the indentation."""
    table = bare_line_breaks(tokenizer)
    pieces = []
    for number, encoding in enumerate(tokenizer.encode_batch(texts)):
        ids = encoding.ids
        if bare_every and number % bare_every == 0:
            ids = [part for i in ids for part in table.get(i, (i,))]
        pieces.append(np.array([*ids, END_OF_TEXT_ID], dtype=np.uint16))
    ends = np.cumsum([len(p) for p in pieces])
    return Stream(
        np.concatenate(pieces), np.array([0, *ends[:-1]]), sum(len(t.encode()) for t in texts)
    )


def bare_line_breaks(tokenizer: Tokenizer) -> dict[int, tuple[int, int]]:
    """Tokens of line breaks with indentation -> (line breaks alone, indentation alone).

    A prompt that ends with a line break ends with the bare token: training must show what can follow that one.
    """
    vocab = tokenizer.get_vocab()
    table = {}
    for token, number in vocab.items():
        blanks = token.lstrip("Ċ")  # how byte-level BPE writes a line break; Ġ is its blank
        breaks = token.removesuffix(blanks)
        if breaks and blanks and blanks in vocab and not blanks.strip("Ġ"):
            table[number] = (vocab[breaks], vocab[blanks])
    return table


def build(tokenizer: Tokenizer, docs: list[Document], bare_every: int = 0) -> Corpus:
    """The documents in an order of their own, and conversations about them."""
    order = np.random.default_rng(SEED).permutation(len(docs))
    chats = conversations(docs, SEED, CONVERSATIONS_PER_DEFINITION)
    return Corpus(
        encode(tokenizer, [docs[i].text for i in order], bare_every),
        encode(tokenizer, [render(c) for c in chats], bare_every),
    )


def batch(corpus: Corpus, first_row: int, num_rows: int, row_len: int) -> Tensor:
    """Rows first_row .. first_row + num_rows - 1 of the run: token ids [num_rows, row_len + 1]."""
    rows = [row_of(corpus, n, row_len) for n in range(first_row, first_row + num_rows)]
    return torch.from_numpy(np.stack(rows).astype(np.int64))


def row_of(corpus: Corpus, row: int, row_len: int) -> Tokens:
    """A row of documents is a window anywhere; a row of chat begins where a conversation begins, as a prompt does."""
    if np.random.default_rng([SEED, row]).random() < CHAT_FRACTION:
        begins = corpus.chat.starts[corpus.chat.starts < len(corpus.chat.tokens) - row_len]
        begin = shuffled(begins, row)
        return corpus.chat.tokens[begin : begin + row_len + 1]
    num_windows = (len(corpus.code.tokens) - 1) // row_len - 1
    offset = int(np.random.default_rng([SEED, row // num_windows, 1]).integers(row_len))
    begin = offset + row_len * shuffled(np.arange(num_windows), row)
    return corpus.code.tokens[begin : begin + row_len + 1]


def shuffled(choices: NDArray[np.int64], row: int) -> int:
    """The choice of number `row` when each pass over the choices takes them in another random order."""
    epoch, index = divmod(row, len(choices))
    return int(np.random.default_rng([SEED, epoch, 2]).permutation(choices)[index])
