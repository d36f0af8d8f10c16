"""An EAGLE-3 head while it is trained: one layer that reads hidden states of a model and guesses the next tokens. It
learns chains as they are computed later: the first guess of a chain reads states of the model, each one after it what
the head itself has made. Source: arXiv:2503.01840, section 3.

    pass 1 at place j    | keys of pass 1 of places .. j |
    pass 2               | keys of pass 1 of places .. j - 1 | key of pass 2 of place j |

Knows no optimizer, nor where lessons come from.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from training.export import write_json
from training.model import (
    MLP,
    RMS_NORM_EPS,
    ROPE_THETA,
    TAUGHT_TEMPERATURE,
    RMSNorm,
    Shape,
    rope_tables,
    rotate,
)
from training.recorded import Lesson
from training.train import HAS_BFLOAT16
from weft.assemble.prepare import prepare
from weft.config.engine import EngineConfig
from weft.models.registry import make_model
from weft.ops.plain import PlainOps
from weft.weights.load import load_weights

NUM_PASSES = 3
PASS_FACTOR = 0.8  # the loss of each pass counts so much of the one before
BEGUN = 0.1  # the root mean square of the model's own state in the head's, at the beginning
MAX_POSITION = 8192


class HeadShape(NamedTuple):
    """The sizes of a head; its hidden states are as long as the model's."""

    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 1152
    num_logits: int = 4096


class Target(NamedTuple):
    """What a head takes of its model."""

    num_layers: int
    embedding: Tensor  # [V, hidden] bfloat16
    norm: Tensor  # [hidden], behind the last layer
    rows: Tensor  # [V, hidden] bfloat16, of its own head

    @property
    def reads(self) -> tuple[int, ...]:
        """The layers whose inputs the head reads; the number of layers: the output of the last."""
        return (self.num_layers // 3, 2 * self.num_layers // 3, self.num_layers)

    @property
    def hidden(self) -> int:
        return self.embedding.shape[1]

    def logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """What the model makes of outputs of its last layer [.., hidden], for rows of its head."""
        x = F.rms_norm(states.float(), (self.hidden,), self.norm, RMS_NORM_EPS)
        return F.linear(x.bfloat16(), rows)


def target(name: str) -> Target:
    """Read it of a model of weft, of the families whose norms are those of Llama."""
    prepared = prepare(EngineConfig(model=name, device="cpu"))
    model = make_model(prepared.model, PlainOps(torch.float32, torch.device("cpu")))
    load_weights(model.weights(), prepared.folder)
    weights = {weight.name: weight for weight in model.weights()}
    embedding = weights["model.embed_tokens.weight"].get().bfloat16()
    rows = embedding
    if "lm_head.weight" in weights:
        rows = weights["lm_head.weight"].get().bfloat16()
    norm = weights["model.norm.weight"].get().float()
    return Target(prepared.model.num_layers, embedding, norm, rows)


class Batch(NamedTuple):
    """What a step learns from. At place j: the state there, the token after it, and what the model expects behind that
    token. N of the places count."""

    states: Tensor  # [B, T, reads * hidden]
    embedded: Tensor  # [B, T, hidden] of the token after each place
    counts: Tensor  # [B, T] whether the answer goes on behind that token
    last: Tensor  # [B, T, hidden] the output of the last layer for that token
    next: Tensor  # [B, T] the token behind it

    @property
    def length(self) -> int:
        return self.states.shape[1]


def batch_of(lessons: Sequence[Lesson], of: Target) -> Batch:
    """The lessons beside each other, padded."""
    longest = max(len(lesson.tokens) for lesson in lessons) - 2
    shape = (len(lessons), longest)
    states = torch.zeros(*shape, lessons[0].states.shape[1])
    last = torch.zeros(*shape, of.hidden)
    known = torch.zeros(shape, dtype=torch.int64)
    following = torch.zeros(shape, dtype=torch.int64)
    counts = torch.zeros(shape, dtype=torch.bool)
    for row, (tokens, own, begin) in enumerate(lessons):
        num = len(tokens) - 2
        states[row, :num] = own[:num]
        last[row, :num] = own[1 : num + 1, -of.hidden :]
        known[row, :num] = tokens[1 : num + 1]
        following[row, :num] = tokens[2:]
        counts[row, max(begin - 2, 0) : num] = True
    return Batch(states, F.embedding(known, of.embedding).float(), counts, last, following)


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
    sizes: Tensor  # [reads * hidden] by which states are divided

    def __init__(self, shape: HeadShape, hidden: int, num_reads: int) -> None:
        super().__init__()
        self.fc = nn.Linear(num_reads * hidden, hidden, bias=False)
        self.midlayer = Layer(shape, hidden)
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, shape.num_logits, bias=False)
        self.register_buffer("sizes", torch.ones(num_reads * hidden))
        for weight in self.parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.02)

    @torch.no_grad()
    def begin_with(self, model: Target, ids: Tensor, lessons: Sequence[Lesson] = ()) -> None:
        """Begin with what the model knows: the state of the last layer, and the rows of its own head. States are divided
        by their usual sizes in `lessons`, of which some are hundreds of times as large as others."""
        if len(lessons):
            self.sizes.zero_()
        for lesson in lessons:
            self.sizes += lesson.states[lesson.begin :].float().square().mean(0) / len(lessons)
        self.sizes.sqrt_()
        own = self.sizes[-model.hidden :]
        self.fc.weight[:, -model.hidden :] += torch.diag(BEGUN * own / own.square().mean().sqrt())
        self.norm.weight.copy_(model.norm)
        self.lm_head.weight.copy_(model.rows[ids])

    def passes(self, batch: Batch, num: int = NUM_PASSES) -> Iterator[Tensor]:
        """What each pass makes of all places, [B, T, hidden]."""
        chain = Chain([], [])
        cos, sin = rope_tables(batch.length, self.midlayer.shape.head_dim)
        state = self.fc(batch.states / self.sizes)
        for _ in range(num):
            state = self.midlayer(state, batch.embedded, chain, cos, sin)
            yield state
            state = moved(state, 1)

    def logits(self, states: Tensor) -> Tensor:
        """[.., hidden] to [.., num_logits]"""
        return self.lm_head(self.norm(states))  # type: ignore[no-any-return]


class Guessable:
    """The tokens that a head can guess."""

    def __init__(self, lessons: Sequence[Lesson], num: int, vocab_size: int) -> None:
        """Those that the answers have most often."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for lesson in lessons:
            counts += torch.bincount(lesson.tokens[lesson.begin :], minlength=vocab_size)
        # Of those that no answer has, the first: a tokenizer lists frequent ones first.
        order = counts.sort(descending=True, stable=True).indices
        self.ids = order[:num].sort().values
        self.is_there = torch.zeros(vocab_size, dtype=torch.bool)
        self.is_there[self.ids] = True


def loss_of(head: Head, batch: Batch, of: Target, can: Guessable, rows: Tensor) -> Tensor:
    """The cross entropy in nats of the passes with what the model expects among the tokens that the
    head can guess, weighted. `rows`: of the model's head, for these tokens."""
    counts = batch.counts & can.is_there[batch.next]
    counts[:, : NUM_PASSES - 1] = False  # no chain of this length ends there
    with torch.no_grad():
        expected = of.logits(batch.last[counts], rows).float()
        chances = (expected / TAUGHT_TEMPERATURE).softmax(-1)
    total = torch.zeros(())
    for number, states in enumerate(head.passes(batch)):
        logits = head.logits(states[counts]).float() / TAUGHT_TEMPERATURE
        losses = logits.logsumexp(-1) - (chances * logits).sum(-1)
        total = total + PASS_FACTOR**number * losses.mean()
    return total


class Rightness(NamedTuple):
    """How often the guesses of a pass would be right, at temperature 0 and at TAUGHT_TEMPERATURE, if those before it
    are."""

    greedy: float
    common: float


@torch.no_grad()
def rightness(
    head: Head, lessons: Sequence[Lesson], of: Target, can: Guessable, num_passes: int = 5
) -> list[Rightness]:
    """Measured on answers that were not learnt; tokens that the head cannot guess count as wrong."""
    sums = torch.zeros(num_passes, 3)
    for lesson in lessons:
        batch = batch_of([lesson], of)
        counts = batch.counts
        counts[:, : num_passes - 1] = False
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            for number, states in enumerate(head.passes(batch, num_passes)):
                expected = of.logits(batch.last[counts], of.rows).float()
                best = expected.argmax(-1)
                chances = (expected / TAUGHT_TEMPERATURE).softmax(-1)[:, can.ids]
                logits = head.logits(states[counts]).float()
                is_right = can.ids[logits.argmax(-1)] == best
                own = (logits / TAUGHT_TEMPERATURE).softmax(-1)
                common = torch.minimum(own, chances).sum()
                sums[number] += torch.stack([is_right.sum(), common, torch.tensor(len(best))])
    return [Rightness(right / num, common / num) for right, common, num in sums.tolist()]


def export(head: Head, of: Target, ids: Tensor, folder: Path) -> None:
    """Write the head as a folder that engines with EAGLE-3 read."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach() for name, tensor in head.state_dict().items()}
    weights["fc.weight"] = weights["fc.weight"] / weights.pop("sizes")
    tensors = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    can_guess = torch.zeros(len(of.rows), dtype=torch.bool)
    can_guess[ids] = True
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["t2d"] = can_guess
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_json(folder / "config.json", config(of, head.midlayer.shape))


def config(model: Target, shape: HeadShape) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "hidden_size": model.hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": len(model.embedding),
        "draft_vocab_size": shape.num_logits,
        "max_position_embeddings": MAX_POSITION,
        "rms_norm_eps": RMS_NORM_EPS,
        "rope_theta": ROPE_THETA,
        "hidden_act": "silu",
        "eagle_aux_hidden_state_layer_ids": list(model.reads),
    }
