"""MTP layers behind tiny random models: guesses are those that the modules of transformers make of
the same tensors, and answers are those of the model."""

from __future__ import annotations

import copy
import json
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.models.many import VOCAB, Checkpoint, make_checkpoint, make_renamed
from tests.models.windowed import Served, assert_greedy
from tests.scheduler.accounts import audit
from tests.seeds import slow
from weft.config.heads import MTP_NAMES, MtpNames
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.heads.guessing import GuessPasses
from weft.messages.replies import StepOutput
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.plan.step import Drafting, Plan

NUM_LAYERS = 4
HIDDEN = 64
MAKERS = {
    "deepseek-v3": MTP_NAMES[0],
    "glm4-moe": MTP_NAMES[0],
    "mimo": MTP_NAMES[1],
    "qwen3.5": MTP_NAMES[2],
    "qwen3-next": MTP_NAMES[2],
}
PLUS_ONE = ("qwen3.5", "qwen3-next")  # norms of these hold weights less 1


class Made(NamedTuple):
    checkpoint: Checkpoint
    names: MtpNames
    own: dict[str, Tensor]  # the tensors around the layer, by their names in `MtpNames`
    plus: int  # what norms add to their weights


@pytest.fixture(scope="module", params=MAKERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A model whose MTP layer has the weights of its last layer."""
    family = request.param
    make = make_renamed if family == "mimo" else make_checkpoint
    checkpoint = make(family, tmp_path_factory.mktemp(family))
    names = MAKERS[family].of(NUM_LAYERS)
    path = checkpoint.folder / "model.safetensors"
    tensors = load_file(path)
    last = f"model.layers.{NUM_LAYERS - 1}."
    for name in list(tensors):
        if name.startswith(last):
            tensors[f"{names.layer}.{name.removeprefix(last)}"] = tensors[name].clone()
    generator = torch.Generator().manual_seed(3)
    plus = int(family in PLUS_ONE)
    own = {
        "projection": torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2,
        **{
            part: 1 - plus + 0.3 * torch.randn(HIDDEN, generator=generator)
            for part in ("embedding_norm", "state_norm", "norm")
        },
    }
    for part, tensor in own.items():
        tensors[f"{names.prefix}.{getattr(names, part)}.weight"] = tensor
    save_file(tensors, path, {"format": "pt"})
    described = checkpoint.folder / "config.json"
    config = json.loads(described.read_text("utf-8"))
    described.write_text(json.dumps({**config, "num_nextn_predict_layers": 1}), "utf-8")
    return Made(checkpoint, names, own, plus)


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, length).tolist()


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@torch.inference_mode()
def first_guesses(made: Made, tokens: list[int]) -> list[int]:
    """Behind each of `tokens` but the first, the likeliest one by transformers' modules: it is what
    the model makes after those before it."""
    whole = made.checkpoint.model
    eps = whole.config.rms_norm_eps
    kept: list[Tensor] = []
    hook = whole.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    normed = whole.model(input_ids=torch.tensor([tokens])).last_hidden_state
    hook.remove()
    states = normed if made.names.reads_normed else kept[0]
    embedded = whole.model.embed_tokens(torch.tensor([tokens]))
    halves = [
        rms(embedded[:, 1:], made.plus + made.own["embedding_norm"], eps),
        rms(states[:, :-1], made.plus + made.own["state_norm"], eps),
    ]
    if not made.names.embedding_first:
        halves.reverse()
    x = torch.cat(halves, -1) @ made.own["projection"].T
    alone = copy.deepcopy(whole)
    layer = alone.model.layers[-1]
    layer.self_attn.layer_idx = 0
    alone.model.layers = nn.ModuleList([layer])
    alone.model.config.num_hidden_layers = 1
    alone.model.config.layer_types = ["full_attention"]
    alone.model.norm.weight.copy_(made.own["norm"])
    logits = alone(inputs_embeds=x, use_cache=False).logits
    return logits[0].argmax(-1).tolist()


class Noted(NamedTuple):
    num_known: int
    tokens: list[int]


def served(
    made: Made, monkeypatch: pytest.MonkeyPatch, kernels: str, **settings: Any
) -> tuple[Served, list[Noted]]:
    """An engine that guesses in every other step, and what it has guessed for its requests."""
    noted: list[Noted] = []
    for kind in (CpuFusedSteps, GuessPasses):
        usual = kind.guess

        def guess(self: Any, plan: Plan, drafting: Drafting, usual: Any = usual) -> Any:
            tokens = usual(self, plan, drafting)
            if len(plan.rows) == 1 and len(tokens):
                noted.append(Noted(int(plan.sampling.positions[0]), tokens.tolist()))
            return tokens

        monkeypatch.setattr(kind, "guess", guess)
    monkeypatch.setattr(
        "weft.scheduler.speculation.guessing.Guesser._count", lambda *args: min(3, args[-1])
    )
    # How long steps take must not decide how much is guessed.
    monkeypatch.setattr("weft.scheduler.speculation.speculator.least_chance", lambda *_: 0.01)
    monkeypatch.setattr("weft.scheduler.speculation.speculator.steps_of_rest", lambda *_: 0)
    # Half of the states may stay snapshots, so drafts need more of them than rows do.
    settings = {
        "context_length": 128,
        "kv_tokens": 1_024,
        "max_mamba_cache_size": 48,
        "max_running_requests": 6,
        **settings,
    }
    return Served(made.checkpoint.folder, kernels=kernels, speculative="mtp", **settings), noted


# Chains by torch are the same (below).
@pytest.mark.parametrize("kernels", ["auto", *slow(["torch"])])
def test_first_guesses_are_those_of_transformers(
    made: Made, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, noted = served(made, monkeypatch, kernels, max_running_requests=1)
    num_guesses = 0
    for seed in range(1, 4):  # some answers are short
        sent = prompt(seed, 20)
        (id,) = engine.run(sent, max_new=20)
        output = engine.outputs[id]
        assert_greedy(made.checkpoint, sent, output)
        num_guesses += len(noted)
        guesses = first_guesses(made, [*sent, *output])
        while noted:
            num_known, tokens = noted.pop()
            assert tokens[0] == guesses[num_known - 2]
    assert num_guesses > 8
    engine.runner.close()


def test_chains_are_the_same_by_torch_and_in_one_call(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for kernels in ("auto", "torch"):
        engine, noted = served(made, monkeypatch, kernels, max_running_requests=1)
        engine.run(prompt(2, 30), max_new=20)
        found.append(noted)
        engine.runner.close()
        monkeypatch.undo()
    assert found[0] == found[1]


@pytest.mark.parametrize("kernels", ["auto", *slow(["torch"])])
def test_several_requests_have_the_answers_of_transformers(
    made: Made, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = served(made, monkeypatch, kernels, chunked_prefill_size=16, page_size=4)
    prompts = [prompt(seed, length) for seed, length in enumerate((5, 40, 40, 77))]
    prompts.append(prompts[-1][:60])
    for _ in range(2):  # first computed, then found in the cache
        for sent, id in zip(prompts, engine.run(*prompts, max_new=12), strict=True):
            assert_greedy(made.checkpoint, sent, engine.outputs[id])
    assert engine.engine.services.stats().total_drafts_mtp > 20
    engine.runner.close()


def sampled(engine: Served) -> tuple[dict[int, list[int]], dict[int, list[Any]]]:
    """Tokens and log probabilities of random requests, sent while others run."""
    rng = random.Random(5)
    tokens: dict[int, list[int]] = {}
    logprobs: dict[int, list[Any]] = {}
    sent = 0
    while sent < 10 or engine.engine.has_work:
        if sent < 10 and rng.random() < 0.15:  # else nearly every step has a prompt
            sampling = SamplingParams(
                max_new_tokens=rng.choice([3, 12, 20]),
                temperature=rng.choice([0.0, 0.7, 1.1]),
                seed=sent,
                logprobs=2,
                frequency_penalty=rng.choice([0.0, 0.5]),
            )
            ids = np.array(prompt(sent % 3, 30), dtype=np.int32).tobytes()
            tokens[sent] = []
            logprobs[sent] = []
            engine.engine.submit(
                GenerateRequest(id=sent, rid=str(sent), input_ids=ids, sampling=sampling)
            )
            sent += 1
        for output in engine.engine.step():
            if not isinstance(output, StepOutput):
                continue
            of = np.frombuffer(output.ids, dtype=np.int64).tolist()
            for id, token in zip(of, np.frombuffer(output.tokens, np.int32).tolist(), strict=True):
                tokens[id].append(token)
            for one in output.logprobs:
                logprobs[one.id].append(one)
        audit(engine.engine.scheduler)
    return tokens, logprobs


def test_random_requests_have_the_bits_of_those_without_guesses(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"kv_tokens": 640, "chunked_prefill_size": 16, "max_mamba_cache_size": 24}
    settings["context_length"] = 128
    plain = Served(made.checkpoint.folder, speculative="off", **settings)
    expected = sampled(plain)
    plain.runner.close()
    engine, _ = served(made, monkeypatch, "auto", **settings)
    assert sampled(engine) == expected
    assert engine.engine.services.stats().total_drafts_mtp > 20
    engine.runner.close()
