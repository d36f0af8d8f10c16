"""What training promises: a fixed split of the corpus, a lossless tokenizer, a loss that falls, an
export with the names that every Llama loader expects, and a resumed run that goes on where it
stopped. Tiny models only.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Template
from safetensors.torch import load_file
from tokenizers import Tokenizer

from training import chat, corpus, data, export, tokenizer
from training.model import LanguageModel, Shape
from training.train import Trainer

TINY = Shape(
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=512,
    max_position=64,
)
SOURCE = '''"""About greetings."""

def greet(name, *, loud=False):
    """Return a greeting for name.

    It is friendly.
    """
    return f"Hello {name}" + "!" * loud
'''


@pytest.fixture(scope="module")
def docs() -> list[corpus.Document]:
    return corpus.documents()


@pytest.fixture(scope="module")
def small_tokenizer() -> Tokenizer:
    return tokenizer.train([SOURCE + "x     y\n"] * 3, vocab_size=TINY.vocab_size)


def test_split_is_deterministic_disjoint_and_about_three_percent(
    docs: list[corpus.Document],
) -> None:
    trained, held_out = corpus.split(docs)
    assert docs == corpus.documents()
    assert {d.name for d in trained} | {d.name for d in held_out} == {d.name for d in docs}
    assert not {d.name for d in trained} & {d.name for d in held_out}
    assert 0.01 < len(held_out) / len(docs) < 0.05


def test_corpus_holds_sources_topics_and_c_modules_but_no_tests(
    docs: list[corpus.Document],
) -> None:
    names = {d.name for d in docs}
    assert {"json/decoder.py", "topics/assert", "builtin/itertools"} <= names
    assert not [n for n in names if "/test/" in n or "site-packages" in n or "_sysconfigdata" in n]


@given(text=st.text())
@settings(max_examples=100, deadline=None)
def test_tokenizer_gives_any_text_back(small_tokenizer: Tokenizer, text: str) -> None:
    assert (
        small_tokenizer.decode(small_tokenizer.encode(text).ids, skip_special_tokens=False) == text
    )


def test_indentation_is_one_token(small_tokenizer: Tokenizer) -> None:
    assert "ĊĠĠĠĠ" in small_tokenizer.encode("\n    return").tokens


def test_bare_line_breaks_keep_the_text(small_tokenizer: Tokenizer) -> None:
    plain, bare = (
        data.encode(small_tokenizer, [SOURCE], every).tokens.tolist() for every in (0, 1)
    )
    assert len(bare) > len(plain)
    assert small_tokenizer.decode(bare) == small_tokenizer.decode(plain) == SOURCE
    assert "ĊĠĠĠĠ" not in map(small_tokenizer.id_to_token, bare)


def test_conversations_quote_the_source_and_render_like_the_chat_template() -> None:
    made = chat.conversations([corpus.Document("greeting.py", SOURCE)], seed=0, per_definition=20)
    answers = {m.content for conversation in made for m in conversation if m.role == "assistant"}
    assert "Return a greeting for name.\n\nIt is friendly." in answers
    assert "`greet(name, *, loud=False)`" in answers
    assert f"```python\n{SOURCE[SOURCE.index('def') :].strip()}\n```" in answers
    template = Template(chat.CHAT_TEMPLATE, keep_trailing_newline=True)
    for conversation in made:
        assert conversation[-1].role == "assistant"
        assert template.render(messages=[m._asdict() for m in conversation]) == chat.render(
            conversation
        )


def test_rows_depend_on_their_number_only(small_tokenizer: Tokenizer) -> None:
    built = data.build(small_tokenizer, [corpus.Document("greeting.py", SOURCE * 20)])
    together = data.batch(built, 3, 4, 16)
    assert together.shape == (4, 17)
    assert torch.equal(together, torch.cat([data.batch(built, n, 1, 16) for n in range(3, 7)]))


def test_three_steps_lower_the_loss_and_a_checkpoint_resumes_exactly(tmp_path: Path) -> None:
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 20, (4, 17)))
    trainer = Trainer(TINY)
    losses = [trainer.step((ids,), lr=0.01) for _ in range(3)]
    assert losses[2] < losses[0] - 0.1
    trainer.save(tmp_path / "checkpoint.safetensors")
    resumed = Trainer(TINY)
    resumed.load(tmp_path / "checkpoint.safetensors")
    assert resumed.progress == trainer.progress
    assert [resumed.step((ids,), 0.01), resumed.step((ids,), 0.01)] == [
        trainer.step((ids,), 0.01),
        trainer.step((ids,), 0.01),
    ]


def test_export_has_the_names_and_files_of_a_llama_checkpoint(
    tmp_path: Path, small_tokenizer: Tokenizer
) -> None:
    small_tokenizer.save(str(tmp_path / "tokenizer.json"))
    out = tmp_path / "out"
    export.export(LanguageModel(TINY).state_dict(), TINY, tmp_path / "tokenizer.json", out)
    weights = load_file(out / "model.safetensors")
    attention = {f"self_attn.{p}_proj" for p in "qkvo"}
    mlp = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    parts = attention | mlp | {"input_layernorm", "post_attention_layernorm"}
    layers = {f"model.layers.{n}.{part}.weight" for n in range(2) for part in parts}
    assert set(weights) == layers | {"model.embed_tokens.weight", "model.norm.weight"}
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert weights["model.layers.0.self_attn.k_proj.weight"].shape == (16, 32)
    assert json.loads((out / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [0, 2]
    assert (
        "<|im_start|>" in json.loads((out / "tokenizer_config.json").read_text())["chat_template"]
    )
