"""What the translation of a model's code into `Ops` brings: the same model by the code of transformers, translated and
as it is, in one process and in turns.

    python benchmarks/translated.py GPT2LMHeadModel PersimmonForCausalLM --hidden-size 512 --layers 12

The models have random weights, and the sizes that the options say. Each has the kernels' products and attention either
way: translated, norms, gates, rotation and sums are theirs, too, and a step is one call, or several with torch between.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import transformers

from weft.bench.testbed import Testbed
from weft.config.engine import EngineConfig
from weft.executor.cpu.fused_step import CpuFusedSteps
from weft.executor.cpu.segmented_model import SegmentedModel
from weft.models.transformers_backend.model import TransformersModel
from weft.sim.synthetic import at_once
from weft.sim.table import table
from weft.weights.known import BUNDLED

INPUT_LEN = 64
OUTPUT_LEN = 17


def write(name: str, asked: argparse.Namespace, folder: Path) -> None:
    """A checkpoint of a class of transformers with random weights."""
    cls = getattr(transformers, name)
    heads = asked.hidden_size // 64
    shape = {
        "hidden_size": asked.hidden_size,
        "intermediate_size": 3 * asked.hidden_size,
        "num_hidden_layers": asked.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": 8_192,
        "max_position_embeddings": 2_048,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        # as OPT and GPT-2 call them
        "ffn_dim": 3 * asked.hidden_size,
        "word_embed_proj_dim": asked.hidden_size,
    }
    config = cls.config_class(**shape, attn_implementation="eager")
    config.architectures = [name]
    cls(config).bfloat16().save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(BUNDLED / file, folder)  # no text is read


@contextmanager
def untranslated() -> Iterator[None]:
    """Models that are built meanwhile run as they are."""
    with patch.object(TransformersModel, "_translate", lambda model: None):
        yield


def form(testbed: Testbed) -> str:
    """How the model was translated."""
    steps = testbed._runner.steps  # type: ignore[attr-defined]
    if isinstance(steps, CpuFusedSteps):
        return "one program"
    return "in part" if isinstance(steps._model, SegmentedModel) else "not"


def itl_s(testbed: Testbed, num_requests: int) -> float:
    """The median time between two tokens of a request."""
    lengths = [(INPUT_LEN, OUTPUT_LEN)] * num_requests
    record = testbed.play(at_once(lengths, first_key=testbed.new_key))
    return float(record.gaps.percentile(50))


def compared(name: str, folder: str, asked: argparse.Namespace) -> Iterator[list[str]]:
    config = EngineConfig(
        model=folder,
        model_impl="transformers",
        dtype="bfloat16",
        threads=asked.threads,
        kv_tokens=8_192,
        context_length=1_024,
        speculative="none",
    )
    ours = Testbed.of(config)
    with untranslated():
        other = Testbed.of(config)
    for num_requests in (1, 16):
        pairs = []
        for number in range(asked.repeats + 1):
            pair = itl_s(ours, num_requests), itl_s(other, num_requests)
            if number:  # the first turn of each is slower
                pairs.append(pair)
        first, second = (statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(slow / fast for fast, slow in pairs)
        yield [
            name,
            form(ours),
            str(num_requests),
            f"{1e3 * first:.2f}",
            f"{1e3 * second:.2f}",
            f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})",
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("classes", nargs="+")
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    titles = ["class", "translated", "requests", "ms a step", "as it is", "times as fast"]
    for name in asked.classes:
        with tempfile.TemporaryDirectory() as folder:
            write(name, asked, Path(folder))
            print(table(titles, list(compared(name, folder, asked))), flush=True)


if __name__ == "__main__":
    main()
