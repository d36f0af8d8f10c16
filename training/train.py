"""Trains a bundled model on the CPU: Muon for the matrices, AdamW for embedding and norms, bfloat16 autocast where the
processor has such instructions, and a learning rate that follows the share of the budget used. A run is resumed from
its work folder, which holds the tokenizer and, per model, the last checkpoint (safetensors) and a log (one JSON object
a line). Does not know where documents come from, nor what a teacher is.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import corpus, data, teacher, tokenizer
from training.export import export
from training.model import SHAPES, LanguageModel, Shape
from training.sample import load_weights

PEAK_LR = 4e-3
WARM_UP_STEPS = 100
DECAY_FROM = 0.3  # share of the budget
BATCH_TOKENS = 8192
ROW_LENS = (
    (0.0, 256),
    (0.4, 512),
    (0.87, 2048),
)  # (from this share of the budget on, tokens a row)
EVALUATION_ROW = 512
TAUGHT_PEAK_LR, TAUGHT_ROWS, HELD_OUT_ROWS = 6e-4, 4, 32
CHECKPOINT_EVERY_S, EVALUATE_EVERY_S, STEPS_PER_LINE = 300.0, 600.0, 10
# Elsewhere products of bfloat16 take many times as long as those of float32.
HAS_BFLOAT16 = torch.backends.cpu.get_cpu_capability() == "AVX512"


@dataclass(frozen=True)
class Budget:
    """A run ends when either limit is reached."""

    seconds: float = math.inf
    tokens: float = math.inf

    def used(self, progress: "Progress") -> float:
        """The share of the budget that is spent, 0 to 1."""
        return min(1.0, max(progress.seconds / self.seconds, progress.tokens / self.tokens))


@dataclass
class Progress:
    """How far a run has come, over all its resumptions."""

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0


def learning_rate(steps: int, used: float) -> float:
    """Linear warm-up, then 1, then linear to zero when `used`, the share of the budget spent, is 1: as a part of the
    peak."""
    return min(1.0, (steps + 1) / WARM_UP_STEPS, (1.0 - used) / (1.0 - DECAY_FROM))


def row_len_at(used: float) -> int:
    """Short rows are cheaper; long ones at the end teach the far positions."""
    return max(length for begin, length in ROW_LENS if used >= begin)


@dataclass
class Trainer:
    """A model with its optimizers and progress: everything that a checkpoint holds."""

    shape: Shape
    compiled: bool = False
    is_taught: bool = False  # it learns from a teacher, and AdamW trains the matrices, too
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        torch.manual_seed(data.SEED)
        self.model = LanguageModel(self.shape)
        self.names = {p: name for name, p in self.model.named_parameters()}
        matrices = [p for p, name in self.names.items() if p.ndim == 2 and "embed" not in name]
        others = [p for p, name in self.names.items() if p.ndim == 1 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = []
        if not self.is_taught:
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
                )
            )
        else:
            others += matrices
        self.optimizers.append(
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0)
        )
        self.loss: Callable[..., Tensor] = self.model.loss
        if self.is_taught:
            self.loss = self.model.taught_loss
        if self.compiled:
            self.loss = torch.compile(self.loss, dynamic=False)

    def step(self, batch: tuple[Tensor, ...], lr: float) -> float:
        """One optimizer step on what the loss takes, ids [rows, row_len + 1] first; returns the loss before it, in nats
        per token."""
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = self.loss(*batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.progress.steps += 1
        self.progress.rows += batch[0].shape[0]
        self.progress.tokens += batch[0][:, 1:].numel()
        return loss.item()

    def save(self, file: Path) -> None:
        """Write weights, optimizer state and progress; a crash leaves the old file or the new one, never a part."""
        tensors = {f"weight:{name}": p.detach() for p, name in self.names.items()}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                assert isinstance(p, nn.Parameter)
                tensors |= {f"{key}:{self.names[p]}": value for key, value in state.items()}
        partial = file.with_suffix(".partial")
        save_file(tensors, partial, metadata={"progress": json.dumps(vars(self.progress))})
        os.replace(partial, file)

    def load(self, file: Path) -> None:
        with safe_open(file, framework="pt") as stored:
            self.progress = Progress(**json.loads(stored.metadata()["progress"]))
            parameters = {name: p for p, name in self.names.items()}
            homes = {
                self.names[p]: o
                for o in self.optimizers
                for g in o.param_groups
                for p in g["params"]
            }
            for entry in stored.keys():  # noqa: SIM118  (not a dict)
                key, name = entry.split(":")
                if key == "weight":
                    parameters[name].data.copy_(stored.get_tensor(entry))
                else:
                    homes[name].state[parameters[name]][key] = stored.get_tensor(entry)


class Course(Protocol):
    """What a run learns from."""

    peak_lr: float

    def batch(self, rows: int, used: float) -> tuple[Tensor, ...]:
        """What the loss takes, behind the first `rows` rows of the run; `used` is the part of the budget that is
        spent."""
        ...

    def held_out(self, model: LanguageModel) -> dict[str, float]:
        """What the model has learnt, measured on what it has not seen."""
        ...


@dataclass
class Texts:
    """Documents, and conversations about them."""

    train: data.Corpus
    unseen: data.Corpus
    peak_lr: float = PEAK_LR

    def batch(self, rows: int, used: float) -> tuple[Tensor, ...]:
        row_len = row_len_at(used)
        return (data.batch(self.train, rows, BATCH_TOKENS // row_len, row_len),)

    def held_out(self, model: LanguageModel) -> dict[str, float]:
        code, bits = evaluate(model, self.unseen.code)
        chat, _ = evaluate(model, self.unseen.chat)
        return {
            "held_out_loss": code,
            "held_out_bits_per_byte": bits,
            "held_out_chat_loss": chat,
        }


@dataclass
class Teaching:
    """The lessons of a teacher; those at the end are not learnt."""

    lessons: teacher.Lessons
    peak_lr: float = TAUGHT_PEAK_LR

    def batch(self, rows: int, used: float) -> tuple[Tensor, ...]:
        known = self.lessons.part(0, -HELD_OUT_ROWS)
        return tuple(teacher.batch(known, rows, TAUGHT_ROWS))

    def held_out(self, model: LanguageModel) -> dict[str, float]:
        return teacher.compare(model, self.lessons.part(-HELD_OUT_ROWS, None))._asdict()


@torch.no_grad()
def evaluate(model: LanguageModel, stream: data.Stream) -> tuple[float, float]:
    """Loss on a whole stream in rows of 512: (nats per token, bits per byte)."""
    num_rows = (len(stream.tokens) - 1) // EVALUATION_ROW
    total = 0.0
    for row in range(num_rows):
        ids = torch.from_numpy(
            stream.tokens[row * EVALUATION_ROW :][: EVALUATION_ROW + 1].astype("int64")
        )[None]
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            total += model.loss(ids).item()
    nats = total / num_rows
    return nats, nats / math.log(2) * len(stream.tokens) / stream.num_bytes


@dataclass
class Run:
    """One training run in its folder: the loop, its log, its checkpoints."""

    trainer: Trainer
    course: Course
    budget: Budget
    folder: Path

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint.safetensors"

    def go(self) -> None:
        """Train until the budget is used, from the last checkpoint if there is one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self.trainer.load(self.checkpoint)
        progress = self.trainer.progress
        began = time.monotonic() - progress.seconds
        saved = evaluated = progress.seconds
        self.report_held_out()
        while (used := self.budget.used(progress)) < 1.0:
            batch = self.course.batch(progress.rows, used)
            lr = self.course.peak_lr * learning_rate(progress.steps, used)
            loss = self.trainer.step(batch, lr)
            progress.seconds = time.monotonic() - began
            if progress.steps % STEPS_PER_LINE == 0:
                self.log(train_loss=loss, lr=lr, used=used, row_len=batch[0].shape[1] - 1)
            if progress.seconds - saved >= CHECKPOINT_EVERY_S:
                self.trainer.save(self.checkpoint)
                saved = progress.seconds
            if progress.seconds - evaluated >= EVALUATE_EVERY_S:
                self.report_held_out()
                evaluated = progress.seconds
        self.trainer.save(self.checkpoint)
        self.report_held_out()

    def report_held_out(self) -> None:
        self.log(**self.course.held_out(self.trainer.model))

    def log(self, **values: float) -> None:
        """One line to the log and to the terminal: progress so far and `values`."""
        progress = self.trainer.progress
        speed = progress.tokens / max(progress.seconds, 1e-9)
        entry = {
            "step": progress.steps,
            "tokens": progress.tokens,
            "seconds": round(progress.seconds, 1),
        }
        entry |= {"tokens_per_s": round(speed), **values}
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")
        print(
            " ".join(
                f"{k}={v:.5g}" if isinstance(v, float) else f"{k}={v}" for k, v in entry.items()
            ),
            flush=True,
        )


def trained_tokenizer(work: Path, docs: list[corpus.Document]) -> Tokenizer:
    """The tokenizer of the work folder; it is trained if there is none."""
    file = work / "tokenizer.json"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        tokenizer.train(d.text for d in docs).save(str(file), pretty=False)
    return Tokenizer.from_file(str(file))


class Asked(NamedTuple):
    """What the command line asks for, with the folder of the run."""

    model: str
    work: Path
    teacher: Path | None
    start: Path | None
    rows: int

    @property
    def folder(self) -> Path:
        return self.work / (self.model if self.teacher is None else f"{self.model}-taught")

    def trainer(self, *, compiled: bool = False) -> Trainer:
        trainer = Trainer(SHAPES[self.model], compiled, is_taught=self.teacher is not None)
        if self.start is not None:
            trainer.model.load_state_dict(load_weights(self.start))
        return trainer

    def course(self) -> Course:
        train_docs, held_out_docs = corpus.split(corpus.documents())
        cut = trained_tokenizer(self.work, train_docs)
        if self.teacher is not None:
            file = self.work / "lessons.safetensors"
            return Teaching(teacher.lessons(self.teacher, file, train_docs, cut, self.rows))
        return Texts(
            data.build(cut, train_docs, data.BARE_LINE_BREAKS_EVERY), data.build(cut, held_out_docs)
        )

    def export(self, out: Path) -> None:
        """Write the last checkpoint as a Hugging Face folder."""
        trainer = self.trainer()
        trainer.load(self.folder / "checkpoint.safetensors")
        export(trainer.model.state_dict(), trainer.shape, self.work / "tokenizer.json", out)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m training.train", description="Train or export a bundled model."
    )
    parser.add_argument("command", choices=("train", "export"), help="train exports at its end")
    parser.add_argument("--model", choices=SHAPES, default="weft-nano")
    parser.add_argument(
        "--work", type=Path, required=True, help="folder for tokenizer, checkpoints and logs"
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for the exported checkpoint"
    )
    parser.add_argument(
        "--teacher", type=Path, help="folder of a trained model: learn what it writes and expects"
    )
    parser.add_argument(
        "--lessons", type=int, default=1408, help="rows of 512 tokens that the teacher writes"
    )
    parser.add_argument(
        "--start", type=Path, help="folder of a trained model of this shape: begin with its weights"
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="budget of wall-clock time")
    parser.add_argument("--tokens", type=float, default=math.inf, help="budget of training tokens")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    asked = Asked(args.model, args.work, args.teacher, args.start, args.lessons)
    if args.command == "train":
        budget = Budget(args.minutes * 60, args.tokens)
        course = asked.course()
        Run(asked.trainer(compiled=True), course, budget, asked.folder).go()
    asked.export(args.out)


if __name__ == "__main__":
    main()
