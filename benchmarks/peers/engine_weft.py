"""weft, in this process. engine_weft.py MODEL [options of weft serve]"""

from __future__ import annotations

import os
import sys

import numpy as np
from engine import serve

from weft.assemble.build import build_engine
from weft.assemble.model_folder import model_folder
from weft.config.adapters import parse_lora_paths
from weft.config.engine import EngineConfig
from weft.config.machine import probe
from weft.config.model import ModelConfig
from weft.config.options import Command
from weft.config.resolve import resolve
from weft.executor.lora.read import inspect_adapter
from weft.messages.adapters import LoadLoraAdapter
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams


def main() -> None:
    command = Command("engine_weft", "", EngineConfig, positional="model")
    config = command.read(sys.argv[1:], os.environ).make(EngineConfig)
    folder = model_folder(config)
    resolved = resolve(config, ModelConfig.from_folder(folder), probe()).config
    engine = build_engine(resolved, folder).engine
    numbers = iter(range(1 << 60))
    uids = []
    for asked in parse_lora_paths(config.lora_paths):
        uids.append(inspect_adapter(asked.path, ModelConfig.from_folder(folder)).uid)
        engine.submit(LoadLoraAdapter(lora_path=asked.path, uid=uids[-1], lora_name=asked.name))
        while engine.has_work:
            engine.step()

    def adapted(prompts: list[list[int]], lens: list[int], adapters: list[int]) -> None:
        for i, (prompt, output_len) in enumerate(zip(prompts, lens, strict=True)):
            number = next(numbers)
            sampling = SamplingParams(max_new_tokens=output_len, temperature=0.0, ignore_eos=True)
            ids = np.array(prompt, dtype=np.int32).tobytes()
            engine.submit(
                GenerateRequest(
                    id=number,
                    rid=str(number),
                    input_ids=ids,
                    sampling=sampling,
                    adapter=uids[adapters[i]] if adapters else "",
                )
            )
        while engine.has_work:
            engine.step()

    def generate(prompts: list[list[int]], lens: list[int]) -> None:
        adapted(prompts, lens, [])

    serve(generate, adapted)


if __name__ == "__main__":
    main()
