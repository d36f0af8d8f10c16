"""Trains an EAGLE-3 head (`head.py`) for a model that weft serves: the model answers questions, and the head learns from
its answers. Muon for the matrices, AdamW for the norms and the rows of logits, a cosine of the time as learning rate. A
run that was stopped goes on from its last checkpoint and its last file of answers when the same command is given again.

    python -m training.teach_head --model SmolLM2-135M-Instruct --work WORK --out WORK/head --minutes 60
"""

import argparse
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training import questions, recorded
from training.head import (
    Guessable,
    Head,
    HeadShape,
    Target,
    batch_of,
    export,
    loss_of,
    rightness,
    target,
)
from training.recorded import Lesson
from training.train import HAS_BFLOAT16

SEED = 20_251
LESSONS = 6  # of a step
POOL = 16  # steps whose lessons are sorted by length, so that little is padded
PEAK_LR = 4e-3
LR_OF_LOGITS = 0.3  # rows of the model's own head are there at the beginning
WARM_UP_STEPS = 40
STEPS_PER_LINE = 20
CHECKPOINT_EVERY_S = 180.0
SIZED = 64  # lessons that say how large states are
UNSEEN = 48  # questions that rightness is measured with


class Training:
    """A head with its optimizers and progress: everything that a checkpoint holds."""

    def __init__(self, head: Head, file: Path) -> None:
        self.head = head
        self.steps = 0
        self.seconds = 0.0
        self._file = file
        named = dict(head.named_parameters())
        inner = [p for name, p in named.items() if p.ndim == 2 and name != "lm_head.weight"]
        norms = [p for p in named.values() if p.ndim == 1]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(inner, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(
                [
                    {"params": norms, "factor": 1.0},
                    {"params": [named["lm_head.weight"]], "factor": LR_OF_LOGITS},
                ],
                lr=PEAK_LR,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        if file.exists():
            self._load()

    def step(self, loss: Tensor, used: float) -> None:
        """Learn. `used`: the part of the budget that is spent; the learning rate is a cosine of it."""
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        cosine = (1 + math.cos(math.pi * used)) / 2
        rate = PEAK_LR * min((self.steps + 1) / WARM_UP_STEPS, cosine)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * group.get("factor", 1.0)
            optimizer.step()
            optimizer.zero_grad()
        self.steps += 1

    def save(self) -> None:
        """A crash leaves the old file or the new one, never a part."""
        partial = self._file.with_suffix(".partial")
        content = {
            "head": self.head.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "steps": self.steps,
            "seconds": self.seconds,
        }
        torch.save(content, partial)
        os.replace(partial, self._file)

    def _load(self) -> None:
        content = torch.load(self._file, weights_only=True)
        self.head.load_state_dict(content["head"])
        for optimizer, state in zip(self._optimizers, content["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.steps, self.seconds = content["steps"], content["seconds"]


def taken(lessons: Sequence[Lesson], step: int) -> list[Lesson]:
    """The lessons of a step, of about the same length; each pass takes them in another order."""
    a_pass = max(1, len(lessons) // LESSONS)
    number, place = divmod(step, a_pass)
    rng = np.random.default_rng([SEED, number])
    order = rng.permutation(len(lessons))
    pool, within = divmod(place, POOL)
    some = order[pool * POOL * LESSONS : min((pool + 1) * POOL * LESSONS, a_pass * LESSONS)]
    by_length = sorted(some.tolist(), key=lambda index: len(lessons[index].tokens))
    groups = rng.permutation(len(some) // LESSONS)
    begin = int(groups[within]) * LESSONS
    return [lessons[index] for index in by_length[begin : begin + LESSONS]]


def train(
    training: Training, lessons: Sequence[Lesson], of: Target, can: Guessable, seconds: float
) -> None:
    """Train for this time, over all resumptions. The learning rate falls to zero at its end."""
    rows = of.rows[can.ids]
    began = time.monotonic() - training.seconds
    saved = training.seconds
    while (used := training.seconds / seconds) < 1:
        batch = batch_of(taken(lessons, training.steps), of)
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = loss_of(training.head, batch, of, can, rows)
        training.step(loss, used)
        training.seconds = time.monotonic() - began
        if training.steps % STEPS_PER_LINE == 0:
            print(f"step {training.steps}, {used:.0%}: loss {loss.item():.3f}", flush=True)
        if training.seconds - saved >= CHECKPOINT_EVERY_S:
            training.save()
            saved = training.seconds
    training.save()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="as weft serve takes it")
    parser.add_argument("--work", type=Path, required=True, help="where answers are kept")
    parser.add_argument("--out", type=Path, required=True, help="where the head is written to")
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--questions", type=int, default=4_700, help="that the model answers")
    parser.add_argument("--turns", type=int, default=1, help="how often it answers each")
    parser.add_argument("--logits", type=int, default=4_096, help="tokens that the head can guess")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    of = target(args.model)
    shape = HeadShape(num_logits=args.logits)

    blank = args.work / "blank"
    any_ids = torch.arange(args.logits)
    untaught = Head(shape, of.hidden, len(of.reads))
    untaught.begin_with(of, any_ids)
    export(untaught, of, any_ids, blank)
    asked = questions.learnt(args.questions)
    recorded.record(args.model, blank, asked, args.work / "learnt", args.turns)
    recorded.record(args.model, blank, questions.unseen(UNSEEN), args.work / "unseen", 1)

    lessons = recorded.read(args.work / "learnt")
    can = Guessable(lessons, args.logits, len(of.rows))
    head = Head(shape, of.hidden, len(of.reads))
    head.begin_with(of, can.ids, lessons[:SIZED])
    training = Training(head, args.work / "checkpoint.pt")
    train(training, lessons, of, can, 60 * args.minutes)
    export(head, of, can.ids, args.out)
    found = rightness(head, recorded.read(args.work / "unseen"), of, can)
    print(json.dumps([one._asdict() for one in found]))


if __name__ == "__main__":
    main()
