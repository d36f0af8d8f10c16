"""What a trained model teaches a smaller one: texts as the teacher itself goes on with them, and for each token that it
wrote what it expected there. weft's engine writes both, because it is the fastest way to many tokens. Knows nothing
about optimizers.

    row         | prompt | what the teacher wrote behind it |      513 tokens
    likely               the 32 likeliest tokens of each place, and their probabilities
"""

import random
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import Message, conversations, render
from training.corpus import Document
from training.data import SEED
from training.model import TAUGHT_TEMPERATURE, LanguageModel
from weft import LLM, Output, SamplingParams

ROW_LEN = 512
MAX_PROMPT = 256  # tokens; of a longer one, the last ones
NUM_LIKELY = 32
WRITING_TEMPERATURES = (0.0, 0.7, 0.7, 0.7, 1.0, 1.0)
CHAT_PART, QUESTION_PART = 0.7, 0.15  # of the prompts; the others are the beginnings of documents
AT_ONCE = 64  # rows that the engine writes together


class Lessons(NamedTuple):
    """Rows of the teacher, and what it expected behind each token but the last one."""

    tokens: Tensor  # [rows, ROW_LEN + 1] int16
    likely: Tensor  # [rows, ROW_LEN, NUM_LIKELY] int16, ids
    chances: Tensor  # [rows, ROW_LEN, NUM_LIKELY] float16, their sum is 1; 0 in the prompt

    def part(self, first: int, last: int | None) -> "Lessons":
        """The rows first..last-1, counted as in a slice."""
        return Lessons(*(tensor[first:last] for tensor in self))


class Likeness(NamedTuple):
    """How like its teacher a model is, as means of the places that the teacher wrote."""

    taught_loss: float  # cross entropy in nats
    overlap: float  # the part of both distributions that is common, at TAUGHT_TEMPERATURE
    greedy: float  # the part of places where both find the same token likeliest


def lessons(
    folder: Path, file: Path, docs: list[Document], tokenizer: Tokenizer, num_rows: int
) -> Lessons:
    """`num_rows` rows of the model in `folder`. They are kept in `file`, and read from there if it exists."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(write(folder, prompts(docs, tokenizer, num_rows))._asdict(), file)
    return Lessons(**load_file(file))


def batch(taught: Lessons, first_row: int, num_rows: int) -> Lessons:
    """Rows first_row .. first_row + num_rows - 1 of the run; each pass takes them in another order."""
    index: list[int] = []
    for row in range(first_row, first_row + num_rows):
        epoch, place = divmod(row, len(taught.tokens))
        order = np.random.default_rng([SEED, epoch, 3]).permutation(len(taught.tokens))
        index.append(int(order[place]))
    tokens, likely, chances = (tensor[index] for tensor in taught)
    return Lessons(tokens.long(), likely.long(), chances.float())


def prompts(docs: list[Document], tokenizer: Tokenizer, num: int) -> list[list[int]]:
    """Beginnings of conversations and of documents, 1 to MAX_PROMPT tokens each."""
    rng = random.Random(SEED)
    chats = conversations(docs, SEED, per_definition=1)
    texts: list[str] = []
    for number in range(num):
        kind = rng.random()
        text = rng.choice(docs).text
        if kind < CHAT_PART:
            texts.append(begun(chats[number % len(chats)], rng))
        elif kind < CHAT_PART + QUESTION_PART:
            question = rng.choice(text.splitlines()).strip()
            texts.append(begun([Message("user", question), Message("assistant", "")], rng))
        else:
            begin = rng.randrange(len(text))
            texts.append(text[begin : begin + rng.randrange(20, 800)])
    return [encoding.ids[-MAX_PROMPT:] for encoding in tokenizer.encode_batch(texts)]


def begun(conversation: list[Message], rng: random.Random) -> str:
    """The text of a conversation up to one of the assistant's turns."""
    turns = [i for i, message in enumerate(conversation) if message.role == "assistant"]
    return render(conversation[: rng.choice(turns)]) + "<|im_start|>assistant\n"


def write(folder: Path, begins: list[list[int]]) -> Lessons:
    """A row for each prompt, written by the model in `folder`.

    End tokens end nothing: what the model expects behind an answer is a lesson, too.
    """
    engine = LLM(str(folder), threads=1, speculative="off", kv_tokens=AT_ONCE * (ROW_LEN + 64))
    num = len(begins)
    written = Lessons(
        torch.zeros(num, ROW_LEN + 1, dtype=torch.int16),
        torch.zeros(num, ROW_LEN, NUM_LIKELY, dtype=torch.int16),
        torch.zeros(num, ROW_LEN, NUM_LIKELY, dtype=torch.float16),
    )
    for first in range(0, num, AT_ONCE):
        some = begins[first : first + AT_ONCE]
        params = [sampling(first + i, len(prompt)) for i, prompt in enumerate(some)]
        for i, output in enumerate(engine.generate(some, params)):
            note(written, first + i, some[i], output)
        print(f"written: {first + len(some)} of {num} rows", flush=True)
    return written


def sampling(number: int, prompt_len: int) -> SamplingParams:
    return SamplingParams(
        max_new_tokens=ROW_LEN + 1 - prompt_len,
        temperature=WRITING_TEMPERATURES[number % len(WRITING_TEMPERATURES)],
        seed=number,
        ignore_eos=True,
        logprobs=NUM_LIKELY,
    )


def note(written: Lessons, row: int, prompt: list[int], output: Output) -> None:
    """Fill a row with a prompt and what was written behind it."""
    begin = len(prompt) - 1
    written.tokens[row] = torch.tensor([*prompt, *output.token_ids])
    expected = output.logprobs
    written.likely[row, begin:] = torch.tensor([one.top_ids for one in expected])
    logprobs = torch.tensor([one.top_logprobs for one in expected])
    written.chances[row, begin:] = (logprobs / TAUGHT_TEMPERATURE).softmax(-1)


@torch.no_grad()
def compare(model: LanguageModel, taught: Lessons) -> Likeness:
    """Compare the model with its teacher on some rows."""
    sums = torch.zeros(4)
    for row in range(len(taught.tokens)):
        ids, likely, chances = batch(taught, row, 1)
        expected = (model(ids[:, :-1]) / TAUGHT_TEMPERATURE).softmax(-1)
        own = expected.gather(-1, likely)
        is_same = (expected.argmax(-1) == likely[..., 0]) & (chances[..., 0] > 0)
        losses = -(chances * own.log()).sum()
        common = torch.minimum(own, chances).sum()
        sums += torch.stack([losses, common, is_same.sum(), chances.sum()])
    loss, overlap, greedy, num = sums.tolist()
    return Likeness(loss / num, overlap / num, greedy / num)
