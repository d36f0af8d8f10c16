"""Trains an EAGLE-3 head for weft-nano: one layer that reads the model's hidden states and guesses the next tokens, from
the lessons of `teacher.py`. It learns chains as they are computed later: the first guess of a chain reads states of the
model, each one after it what the head itself has made. Source: arXiv:2503.01840, section 3.

    pass 1 at place j    | keys of pass 1 of places .. j |
    pass 2               | keys of pass 1 of places .. j - 1 | key of pass 2 of place j |

    python -m training.head --teacher weft/bundled/weft-nano --work WORK --out WORK/head --minutes 20
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from training import corpus, data, teacher
from training.export import write_json
from training.model import (
    MLP,
    RMS_NORM_EPS,
    ROPE_THETA,
    TAUGHT_TEMPERATURE,
    LanguageModel,
    RMSNorm,
    Shape,
    rotate,
)
from training.sample import load
from training.train import HAS_BFLOAT16, HELD_OUT_ROWS, WARM_UP_STEPS

READS = (2, 4, 6)  # inputs of these layers of the model; 6: the output of the last
NUM_PASSES = 2
PASS_FACTOR = 0.8  # the loss of each pass counts so much of the one before
ROWS = 4
PEAK_LR = 1.5e-3
STEPS_PER_LINE = 20


class HeadShape(NamedTuple):
    """The sizes of a head; its hidden states are as long as the model's."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    num_logits: int = 1536


class Batch(NamedTuple):
    """What a step learns from. At place j: the state there, the id of the token after it, and what the model expects
    behind that token."""

    states: Tensor  # [B, T, len(READS) * hidden]
    embedded: Tensor  # [B, T, hidden] of the token after each place
    likely: Tensor  # [B, T, K] places in the list of tokens that the head can guess
    chances: Tensor  # [B, T, K] 0 for tokens that it cannot


class Chain(NamedTuple):
    """What later passes read of the earlier ones: keys and values [B, heads, T, head_dim] of each, from the first."""

    keys: list[Tensor]
    values: list[Tensor]


class Layer(nn.Module):
    """The one layer, with the names of a checkpoint."""

    def __init__(self, shape: HeadShape, hidden: int) -> None:
        super().__init__()
        self.shape = shape
        q_size = shape.num_heads * shape.head_dim
        kv_size = shape.num_kv_heads * shape.head_dim
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": nn.Linear(2 * hidden, q_size, bias=False),
                "k_proj": nn.Linear(2 * hidden, kv_size, bias=False),
                "v_proj": nn.Linear(2 * hidden, kv_size, bias=False),
                "o_proj": nn.Linear(q_size, hidden, bias=False),
            }
        )
        sizes = Shape(hidden, 1, shape.num_heads, shape.num_kv_heads, shape.head_dim, 0)
        self.mlp = MLP(Shape(**{**vars(sizes), "intermediate_size": shape.intermediate_size}))
        self.input_layernorm = RMSNorm(hidden)
        self.hidden_norm = RMSNorm(hidden)
        self.post_attention_layernorm = RMSNorm(hidden)

    def forward(
        self, state: Tensor, embedded: Tensor, chain: Chain, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """One pass: states and embeddings [B, T, hidden] -> [B, T, hidden]. Its keys and values join the chain."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(state)], -1)
        q, k, v = (self._by_head(self.self_attn[f"{name}_proj"](both)) for name in "qkv")
        group = self.shape.num_heads // self.shape.num_kv_heads
        chain.keys.append(rotate(k, cos, sin).repeat_interleave(group, 1))
        chain.values.append(v.repeat_interleave(group, 1))
        mixed = attend(rotate(q, cos, sin), chain)
        x = state + self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))  # type: ignore[no-any-return]

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.shape.head_dim).transpose(1, 2)


def attend(q: Tensor, chain: Chain) -> Tensor:
    """The last pass of a chain, [B, heads, T, head_dim]: each place sees the first pass up to where its chain begins,
    and of each later pass the one place of its chain."""
    num_later = len(chain.keys) - 1
    length, head_dim = q.shape[-2:]
    scale = 1 / math.sqrt(head_dim)
    places = torch.arange(length)
    is_seen = places[None, :] <= places[:, None] - num_later
    # A place before any chain of this length sees itself alone, and is not learnt from.
    is_seen |= (places[None, :] == 0) & (places[:, None] < num_later)
    first = (q @ chain.keys[0].transpose(-1, -2) * scale).masked_fill(~is_seen, -math.inf)
    scores = [first]
    for age, key in enumerate(reversed(chain.keys[1:])):
        scores.append((q * moved(key, age)).sum(-1, keepdim=True) * scale)
    chances = torch.cat(scores, -1).float().softmax(-1).to(q.dtype)
    mixed = chances[..., :length] @ chain.values[0]
    for age, value in enumerate(reversed(chain.values[1:])):
        mixed = mixed + chances[..., length + age, None] * moved(value, age)
    return mixed


def moved(x: Tensor, num: int) -> Tensor:
    """x [.., T, size] moved `num` places to the right, zeros before it."""
    return F.pad(x, (0, 0, num, 0))[..., : x.shape[-2], :]


class Head(nn.Module):
    def __init__(self, shape: HeadShape, hidden: int, num_passes: int = NUM_PASSES) -> None:
        super().__init__()
        self.num_passes = num_passes
        self.fc = nn.Linear(len(READS) * hidden, hidden, bias=False)
        self.midlayer = Layer(shape, hidden)
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, shape.num_logits, bias=False)
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    @torch.no_grad()
    def begin_with(self, model: LanguageModel, ids: Tensor) -> None:
        """Begin with what the model knows: the state of the last layer as it is, and the rows of its own head."""
        hidden = model.shape.hidden_size
        self.fc.weight[:, -hidden:] += torch.eye(hidden)
        self.norm.weight.copy_(model.model.norm.weight)
        self.midlayer.hidden_norm.weight.copy_(model.model.norm.weight)
        self.lm_head.weight.copy_(model.model.embed_tokens.weight[ids])

    def passes(self, batch: Batch, cos: Tensor, sin: Tensor) -> Iterator[Tensor]:
        """The logits of each pass, [B, T, num_logits]."""
        chain = Chain([], [])
        state = self.fc(batch.states)
        for _ in range(self.num_passes):
            state = self.midlayer(state, batch.embedded, chain, cos, sin)
            yield self.lm_head(self.norm(state))
            state = moved(state, 1)

    def loss(self, batch: Batch, cos: Tensor, sin: Tensor) -> Tensor:
        """The cross entropy in nats of the passes with what the model expects, weighted."""
        total = torch.zeros(())
        for number, logits in enumerate(self.passes(batch, cos, sin)):
            expected = (logits.float() / TAUGHT_TEMPERATURE).log_softmax(-1)
            chances = batch.chances[:, number:]
            of_pass = -(chances * expected.gather(-1, batch.likely)[:, number:]).sum()
            total = total + PASS_FACTOR**number * of_pass / chances.sum()
        return total


class Rightness(NamedTuple):
    """How often the guesses of a pass would be right, at temperature 0 and at TAUGHT_TEMPERATURE, if those before it
    are."""

    greedy: float
    common: float


class Teacher:
    """The model, the tokens that its head can guess, and its lessons."""

    def __init__(self, folder: Path, lessons: teacher.Lessons, num_logits: int) -> None:
        self.model: LanguageModel = load(folder).eval().requires_grad_(requires_grad=False)
        self.lessons = lessons
        self.ids = frequent(lessons, num_logits, self.model.shape.vocab_size)
        self.place_of = torch.full((self.model.shape.vocab_size,), -1)
        self.place_of[self.ids] = torch.arange(num_logits)
        self._kept: dict[int, Tensor] = {}
        for layer in READS:
            self._listen(layer)

    def _listen(self, layer: int) -> None:
        layers = self.model.model.layers
        if layer == len(layers):
            layers[-1].register_forward_hook(
                lambda _module, _inputs, output: self._kept.update({layer: output})
            )
            return
        layers[layer].register_forward_pre_hook(
            lambda _module, inputs: self._kept.update({layer: inputs[0]})
        )

    @torch.no_grad()
    def batch(self, lessons: teacher.Lessons, first_row: int, num_rows: int) -> Batch:
        tokens, likely, chances = teacher.batch(lessons, first_row, num_rows)
        ids = tokens[:, :-1]
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            self.model(ids)
        states = torch.cat([self._kept[layer].float() for layer in READS], -1)
        places = self.place_of[likely]
        known = chances * (places >= 0)
        embedded = self.model.model.embed_tokens(ids)
        return Batch(states[:, :-1], embedded[:, 1:], places.clamp(min=0)[:, 1:], known[:, 1:])


def frequent(lessons: teacher.Lessons, num: int, vocab_size: int) -> Tensor:
    """The tokens that the model expects most often, [num] rising."""
    mass = torch.zeros(vocab_size)
    mass.index_add_(0, lessons.likely.flatten().long(), lessons.chances.flatten().float())
    return mass.topk(num).indices.sort().values


@torch.no_grad()
def rightness(head: Head, of: Teacher, lessons: teacher.Lessons) -> list[Rightness]:
    """Measured on rows that were not learnt; tokens that the head cannot guess count as wrong."""
    model = of.model
    sums = torch.zeros(head.num_passes, 3)
    for row in range(len(lessons.tokens)):
        batch = of.batch(lessons, row, 1)
        _, likely, chances = teacher.batch(lessons, row, 1)
        best = of.place_of[likely[:, 1:, 0]]
        is_there = chances[:, 1:, 0] > 0
        length = batch.states.shape[1]
        for number, logits in enumerate(head.passes(batch, model.cos[:length], model.sin[:length])):  # type: ignore[index]
            expected = (logits.float() / TAUGHT_TEMPERATURE).softmax(-1)
            is_right = (logits.argmax(-1) == best) & is_there
            common = torch.minimum(expected.gather(-1, batch.likely), batch.chances)
            counted = is_there[:, number:].sum()
            sums[number] += torch.stack(
                [is_right[:, number:].sum(), common[:, number:].sum(), counted]
            )
    return [Rightness(right / num, common / num) for right, common, num in sums.tolist()]


def train(of: Teacher, head: Head, seconds: float) -> None:
    """Train for this time. The learning rate falls to zero at its end."""
    matrices = [p for p in head.parameters() if p.ndim == 2]
    others = [p for p in head.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}],
        lr=PEAK_LR,
        betas=(0.9, 0.95),
    )
    known = of.lessons.part(0, -HELD_OUT_ROWS)
    began = time.monotonic()
    step = 0
    while (used := (time.monotonic() - began) / seconds) < 1:
        batch = of.batch(known, step * ROWS, ROWS)
        length = batch.states.shape[1]
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            loss = head.loss(batch, of.model.cos[:length], of.model.sin[:length])  # type: ignore[index]
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / WARM_UP_STEPS, 1 - used)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % STEPS_PER_LINE == 0:
            tokens = step * ROWS * length
            print(f"step {step}, {tokens:,} tokens, {used:.0%}: loss {loss.item():.3f}", flush=True)


def export(head: Head, of: Teacher, shape: HeadShape, folder: Path) -> None:
    """Write the head as a folder that engines with EAGLE-3 read."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.state_dict().items()
    }
    can_guess = of.place_of >= 0
    tensors["d2t"] = of.ids - torch.arange(len(of.ids))
    tensors["t2d"] = can_guess
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config(of.model.shape, shape))


def config(model: Shape, shape: HeadShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": model.vocab_size,
        "draft_vocab_size": shape.num_logits,
        "max_position_embeddings": model.max_position,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": list(READS),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--teacher", type=Path, required=True, help="the folder of the model")
    parser.add_argument("--work", type=Path, required=True, help="where lessons are kept")
    parser.add_argument("--out", type=Path, required=True, help="where the head is written to")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--lessons", type=int, default=832, help="rows that the model writes")
    parser.add_argument("--threads", type=int, default=0, help="0: all")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(data.SEED)
    docs, _ = corpus.split(corpus.documents())
    cut = Tokenizer.from_file(str(args.teacher / "tokenizer.json"))
    file = args.work / "lessons.safetensors"
    lessons = teacher.lessons(args.teacher, file, docs, cut, args.lessons)
    shape = HeadShape()
    of = Teacher(args.teacher, lessons, shape.num_logits)
    head = Head(shape, of.model.shape.hidden_size)
    head.begin_with(of.model, of.ids)
    train(of, head, 60 * args.minutes)
    export(head, of, shape, args.out)
    found = rightness(head, of, lessons.part(-HELD_OUT_ROWS, None))
    print(json.dumps([one._asdict() for one in found]))


if __name__ == "__main__":
    main()
