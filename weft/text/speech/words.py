"""When each word was said: the path through the weights with which the decoder attended to the
sound that is the likeliest to rise in both.

Source: dynamic time warping, Sakoe and Chiba, IEEE Transactions on Acoustics, Speech, and Signal
Processing, 26 (1), 1978. As in Whisper, ties go to the vector before.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from weft.arrays import FloatArray
from weft.text.speech.languages import WITHOUT_BLANKS
from weft.text.speech.vocabulary import TIME_STEP_S

FILTER = 7  # vectors of the median filter
NEW_TOKEN = (0, 1)  # moves of the path that reach another token
OPENING = "\"'“¡¿([{-"
CLOSING = "\"'.。,，!！?？:：”)]}、"
NO_CHARACTER = "\ufffd"  # stands for bytes that are none


class Word(NamedTuple):
    text: str
    start_s: float
    end_s: float
    ids: tuple[int, ...]


def token_times(weights: FloatArray) -> list[float]:
    """The time at which the token after each one begins, in seconds of the window.

    weights [tokens, heads, vectors]: as many vectors as the sound has in the window. The last time
    is that of the end of the output.
    """
    if not len(weights) or not weights.shape[-1]:
        return [0.0] * len(weights)
    by_head = weights.transpose(1, 0, 2).astype(np.float32)
    deviation = by_head.std(axis=1, keepdims=True)
    # Weights that are the same for all tokens say nothing.
    centred = by_head - by_head.mean(axis=1, keepdims=True)
    normed = np.divide(centred, deviation, out=np.zeros_like(centred), where=deviation > 0)
    matrix = _smoothed(normed).mean(axis=0)
    return [float(place * TIME_STEP_S) for place in _first_vectors(-matrix.astype(np.float64))]


def _smoothed(values: FloatArray) -> FloatArray:
    """The median of each value and its neighbours along the last axis."""
    half = FILTER // 2
    if values.shape[-1] <= half:
        return values
    padded = np.pad(values, ((0, 0), (0, 0), (half, half)), mode="reflect")
    medians: FloatArray = np.sort(sliding_window_view(padded, FILTER, axis=-1), axis=-1)[..., half]
    return medians


def _first_vectors(costs: NDArray[np.float64]) -> list[int]:
    """The vector at which the cheapest path through costs [tokens, vectors] reaches each token.

    Cells are computed along the other diagonals, because each needs its neighbours on the two
    before.
    """
    num_tokens, num_vectors = costs.shape
    total = np.full((num_tokens + 1, num_vectors + 1), np.inf, dtype=np.float32)
    total[0, 0] = 0
    move = np.full((num_tokens + 1, num_vectors + 1), 2, dtype=np.int8)
    move[:, 0] = 1
    move[0, :] = 2
    for diagonal in range(2, num_tokens + num_vectors + 1):
        tokens = np.arange(max(1, diagonal - num_vectors), min(num_tokens, diagonal - 1) + 1)
        vectors = diagonal - tokens
        both = total[tokens - 1, vectors - 1]
        token = total[tokens - 1, vectors]
        vector = total[tokens, vectors - 1]
        takes_both = (both < token) & (both < vector)
        takes_token = (token < both) & (token < vector)
        before = np.where(takes_both, both, np.where(takes_token, token, vector))
        total[tokens, vectors] = before + costs[tokens - 1, vectors - 1]
        move[tokens, vectors] = np.where(takes_both, 0, np.where(takes_token, 1, 2))
    first = [0] * num_tokens
    token_index = num_tokens
    vector_index = num_vectors
    while token_index > 0:
        first[token_index - 1] = max(vector_index - 1, 0)
        step = int(move[token_index, vector_index])
        token_index -= step in NEW_TOKEN
        vector_index -= step in (0, 2)
    return first


def words_of(
    ids: Sequence[int],
    spans: Sequence[tuple[float, float]],
    language: str,
    decode: Callable[[Sequence[int]], str],
) -> list[Word]:
    """The words of text tokens, each with the seconds from and to which it was said."""
    pieces = _pieces(ids, decode)
    if language not in WITHOUT_BLANKS:
        pieces = _joined_at_blanks(pieces)
    pieces = _with_punctuation(pieces)
    found = []
    begin = 0
    for text, length in pieces:
        end = begin + length
        found.append(Word(text, spans[begin][0], spans[end - 1][1], tuple(ids[begin:end])))
        begin = end
    return found


Piece = tuple[str, int]  # a text and the number of its tokens


def _pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Piece]:
    """The shortest runs of tokens that are full characters, or that are none in the text of all
    tokens, either."""
    full = decode(ids)
    found: list[Piece] = []
    begin = 0
    num_before = 0  # characters
    for end in range(1, len(ids) + 1):
        text = decode(ids[begin:end])
        at = text.find(NO_CHARACTER)
        in_full = full[num_before + at : num_before + at + 1]
        if at < 0 or in_full in ("", NO_CHARACTER) or end == len(ids):
            found.append((text, end - begin))
            begin = end
            num_before += len(text)
    return found


def _joined_at_blanks(pieces: Sequence[Piece]) -> list[Piece]:
    found: list[Piece] = []
    for text, length in pieces:
        is_alone = text.startswith(" ") or text.strip() in string.punctuation
        if is_alone or not found:
            found.append((text, length))
            continue
        before, length_before = found.pop()
        found.append((before + text, length_before + length))
    return found


def _with_punctuation(pieces: Sequence[Piece]) -> list[Piece]:
    """Opening marks join the word after them, closing marks the word before. As in Whisper, several
    marks in the order of these lists are one, and so is a blank by itself."""
    opened: list[Piece] = []  # the last one first
    for text, length in reversed(pieces):
        if opened and text.startswith(" ") and text.strip() in OPENING:
            after, length_after = opened.pop()
            opened.append((text + after, length + length_after))
        else:
            opened.append((text, length))
    found: list[Piece] = []
    for text, length in reversed(opened):
        if found and text in CLOSING and not found[-1][0].endswith(" "):
            before, length_before = found.pop()
            found.append((before + text, length_before + length))
        else:
            found.append((text, length))
    return found
