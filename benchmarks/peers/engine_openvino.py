"""OpenVINO GenAI with continuous batching. engine_openvino.py FOLDER [GB of KV cache]"""

from __future__ import annotations

import sys

import numpy as np
import openvino as ov
import openvino_genai as genai
from engine import serve


def main() -> None:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    scheduler.enable_prefix_caching = True
    pipeline = genai.ContinuousBatchingPipeline(sys.argv[1], scheduler, "CPU", {})

    def generate(prompts: list[list[int]], lens: list[int]) -> None:
        settings = []
        for output_len in lens:
            one = genai.GenerationConfig()
            one.max_new_tokens, one.ignore_eos, one.do_sample = output_len, True, False
            settings.append(one)
        pipeline.generate(
            [ov.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts], settings
        )

    serve(generate)


if __name__ == "__main__":
    main()
