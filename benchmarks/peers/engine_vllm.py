"""vLLM for CPUs, without tokenizer. engine_vllm.py FOLDER [name=value of EngineArgs]"""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from engine import serve
from vllm import LLM, SamplingParams


def main() -> None:
    folder, *settings = sys.argv[1:]
    llm = LLM(
        model=folder,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=2048,
        **dict(setting.split("=", 1) for setting in settings),
    )

    def generate(prompts: list[list[int]], lens: list[int]) -> None:
        sampling = [
            SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lens
        ]
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)

    serve(generate)


if __name__ == "__main__":
    main()
