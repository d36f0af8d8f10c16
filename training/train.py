"""Trains a bundled model on the CPU: Muon for the matrices, AdamW for embedding and norms, bfloat16 autocast, and a
learning rate that follows the share of the budget used. A run is resumed from its work folder, which holds the
tokenizer and, per model, the last checkpoint (safetensors) and a log (one JSON object a line). Does not know where
documents come from.
"""

import argparse
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import corpus, data, tokenizer
from training.export import export
from training.model import SHAPES, LanguageModel, Shape

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
CHECKPOINT_EVERY_S, EVALUATE_EVERY_S, STEPS_PER_LINE = 300.0, 600.0, 10


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
    """Linear warm-up, then constant, then linear to zero when `used`, the share of the budget spent, is 1."""
    return PEAK_LR * min(1.0, (steps + 1) / WARM_UP_STEPS, (1.0 - used) / (1.0 - DECAY_FROM))


def row_len_at(used: float) -> int:
    """Short rows are cheaper; long ones at the end teach the far positions."""
    return max(length for begin, length in ROW_LENS if used >= begin)


@dataclass
class Trainer:
    """A model with its optimizers and progress: everything that a checkpoint holds."""

    shape: Shape
    compiled: bool = False
    progress: Progress = field(default_factory=Progress)

    def __post_init__(self) -> None:
        torch.manual_seed(data.SEED)
        self.model = LanguageModel(self.shape)
        self.names = {p: name for name, p in self.model.named_parameters()}
        matrices = [p for p, name in self.names.items() if p.ndim == 2 and "embed" not in name]
        others = [p for p, name in self.names.items() if p.ndim == 1 or "embed" in name]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=PEAK_LR, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(others, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.loss: Callable[[Tensor], Tensor] = self.model.loss
        if self.compiled:
            self.loss = torch.compile(self.loss, dynamic=False)

    def step(self, ids: Tensor, lr: float) -> float:
        """One optimizer step on ids [rows, row_len + 1]; returns the loss before it, in nats per token."""
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
            optimizer.zero_grad()
        self.progress.steps += 1
        self.progress.rows += ids.shape[0]
        self.progress.tokens += ids[:, 1:].numel()
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

    @torch.no_grad()
    def evaluate(self, stream: data.Stream) -> tuple[float, float]:
        """Loss on a whole stream in rows of 512: (nats per token, bits per byte)."""
        num_rows = (len(stream.tokens) - 1) // EVALUATION_ROW
        total = 0.0
        for row in range(num_rows):
            ids = torch.from_numpy(
                stream.tokens[row * EVALUATION_ROW :][: EVALUATION_ROW + 1].astype("int64")
            )[None]
            with torch.autocast("cpu", torch.bfloat16):
                total += self.model.loss(ids).item()
        nats = total / num_rows
        return nats, nats / math.log(2) * len(stream.tokens) / stream.num_bytes


@dataclass
class Run:
    """One training run in its folder: the loop, its log, its checkpoints."""

    trainer: Trainer
    train: data.Corpus
    held_out: data.Corpus
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
            row_len = row_len_at(used)
            ids = data.batch(self.train, progress.rows, BATCH_TOKENS // row_len, row_len)
            lr = learning_rate(progress.steps, used)
            loss = self.trainer.step(ids, lr)
            progress.seconds = time.monotonic() - began
            if progress.steps % STEPS_PER_LINE == 0:
                self.log(train_loss=loss, lr=lr, used=used, row_len=row_len)
            if progress.seconds - saved >= CHECKPOINT_EVERY_S:
                self.trainer.save(self.checkpoint)
                saved = progress.seconds
            if progress.seconds - evaluated >= EVALUATE_EVERY_S:
                self.report_held_out()
                evaluated = progress.seconds
        self.trainer.save(self.checkpoint)
        self.report_held_out()

    def report_held_out(self) -> None:
        code, bits = self.trainer.evaluate(self.held_out.code)
        chat, _ = self.trainer.evaluate(self.held_out.chat)
        self.log(held_out_loss=code, held_out_bits_per_byte=bits, held_out_chat_loss=chat)

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


def prepare(work: Path) -> tuple[data.Corpus, data.Corpus]:
    """(training, held-out) corpus in tokens; trains the tokenizer of the work folder if it has none."""
    train_docs, held_out_docs = corpus.split(corpus.documents())
    file = work / "tokenizer.json"
    if not file.exists():
        work.mkdir(parents=True, exist_ok=True)
        tokenizer.train(d.text for d in train_docs).save(str(file), pretty=False)
    trained = Tokenizer.from_file(str(file))
    return data.build(trained, train_docs, data.BARE_LINE_BREAKS_EVERY), data.build(
        trained, held_out_docs
    )


def export_checkpoint(name: str, work: Path, out: Path) -> None:
    """Write the last checkpoint of model `name` as a Hugging Face folder."""
    trainer = Trainer(SHAPES[name])
    trainer.load(work / name / "checkpoint.safetensors")
    export(trainer.model.state_dict(), trainer.shape, work / "tokenizer.json", out)


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
    parser.add_argument("--minutes", type=float, default=math.inf, help="budget of wall-clock time")
    parser.add_argument("--tokens", type=float, default=math.inf, help="budget of training tokens")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    torch.set_num_threads(args.threads)
    if args.command == "train":
        train_corpus, held_out = prepare(args.work)
        budget = Budget(args.minutes * 60, args.tokens)
        Run(
            Trainer(SHAPES[args.model], compiled=True),
            train_corpus,
            held_out,
            budget,
            args.work / args.model,
        ).go()
    export_checkpoint(args.model, args.work, args.out)


if __name__ == "__main__":
    main()
