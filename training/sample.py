"""Continues a prompt with an exported model, the slow and simple way: no KV cache, the training model in float32. It
shows what a model learned; serving is the engine's work. Knows nothing about training.

    python -m training.sample weft/bundled/weft-nano "def fibonacci(n):"
    python -m training.sample weft/bundled/weft-nano --chat "What does os.path.join do?"
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor

from training.chat import Message, render
from training.model import SHAPES, LanguageModel
from training.tokenizer import END_OF_TEXT_ID, IM_END_ID


def load(folder: Path) -> LanguageModel:
    """The model in an exported folder, in float32."""
    hidden_size = json.loads((folder / "config.json").read_text(encoding="utf-8"))["hidden_size"]
    model = LanguageModel(
        next(shape for shape in SHAPES.values() if shape.hidden_size == hidden_size)
    )
    model.load_state_dict(load_weights(folder))
    return model


def load_weights(folder: Path) -> dict[str, Tensor]:
    """The weights in an exported folder, in float32."""
    stored = load_file(folder / "model.safetensors")
    return {name: weight.float() for name, weight in stored.items()}


@torch.inference_mode()
def continue_tokens(
    model: LanguageModel, prompt: list[int], num_tokens: int, temperature: float
) -> list[int]:
    """At most `num_tokens` tokens after `prompt`, up to an end token; temperature 0 takes the likeliest."""
    ids = list(prompt)
    for _ in range(num_tokens):
        logits = model(torch.tensor([ids]))[0, -1]
        likeliest = int(logits.argmax())
        drawn = (
            int(torch.multinomial((logits / temperature).softmax(0), 1))
            if temperature > 0
            else likeliest
        )
        if drawn in (END_OF_TEXT_ID, IM_END_ID):
            break
        ids.append(drawn)
    return ids[len(prompt) :]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m training.sample", description="Continue a prompt with an exported model."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("prompt")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's message")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    tokenizer = Tokenizer.from_file(str(args.folder / "tokenizer.json"))
    prompt = (
        render([Message("user", args.prompt)]) + "<|im_start|>assistant\n"
        if args.chat
        else args.prompt
    )
    reply = continue_tokens(
        load(args.folder), tokenizer.encode(prompt).ids, args.max_tokens, args.temperature
    )
    print(tokenizer.decode(reply) if args.chat else prompt + tokenizer.decode(reply))


if __name__ == "__main__":
    main()
