"""vLLM for CPUs, without tokenizer. engine_vllm.py FOLDER [lora=FOLDER] [name=value of EngineArgs]

The folder of `lora` has the adapters 0 to 7, as `benchmarks/adapters.py --write` makes them."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from engine import serve
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

NUM_ADAPTERS = 8
RANK = 16


def main() -> None:
    folder, *words = sys.argv[1:]
    settings = dict(word.split("=", 1) for word in words)
    adapters = settings.pop("lora", "")
    lora = {"enable_lora": True, "max_loras": NUM_ADAPTERS, "max_lora_rank": RANK}
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        **(lora if adapters else {}),
        **settings,
    )

    def adapted(prompts: list[list[int]], lens: list[int], numbers: list[int]) -> None:
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lens
        ]
        asked = [LoRARequest(str(i), i + 1, f"{adapters}/{i}") for i in numbers]
        llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling,
            use_tqdm=False,
            lora_request=asked or None,
        )

    def generate(prompts: list[list[int]], lens: list[int]) -> None:
        adapted(prompts, lens, [])

    serve(generate, adapted)


if __name__ == "__main__":
    main()
