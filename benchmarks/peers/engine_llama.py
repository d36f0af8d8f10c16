"""llama.cpp or ik_llama.cpp by its C interface, all requests in one batch a step.

engine_llama.py FILE.gguf [threads] [--repack] [--flash]

--repack: ik_llama.cpp lays weights out anew when it loads them. --flash: its attention in one pass; llama.cpp decides itself.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from engine import serve
from llama_package import IS_IK, clear, ll

BATCH, CONTEXT, SEQUENCES = 512, 40_960, 32
REPACK = "--repack"
FLASH = "--flash"


class Llama:
    def __init__(self, path: str, threads: int, *, repacks: bool, flash: bool) -> None:
        ll.llama_backend_init()
        of_model = ll.llama_model_default_params()
        if repacks:
            of_model.repack_tensors = True
            of_model.use_mmap = False
        self.model = ll.llama_model_load_from_file(path.encode(), of_model)
        params = ll.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = (
            CONTEXT,
            BATCH,
            BATCH,
            SEQUENCES,
        )
        params.n_threads = params.n_threads_batch = threads
        if IS_IK:
            params.flash_attn = flash
        else:
            params.kv_unified = False
        self.context = ll.llama_init_from_model(self.model, params)
        self.vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(self.model))
        self.batch = ll.llama_batch_init(BATCH, 0, 1)

    def step(self, work: list[tuple[int, int, int, bool]]) -> list[int]:
        """Run (token, position, sequence, wants a token); returns the likeliest next tokens of those that want one."""
        batch = self.batch
        batch.n_tokens = len(work)
        for i, (token, position, sequence, wanted) in enumerate(work):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if ll.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        chosen = []
        for i, (_, _, _, wanted) in enumerate(work):
            if wanted:
                logits = np.ctypeslib.as_array(
                    ll.llama_get_logits_ith(self.context, i), (self.vocab_size,)
                )
                chosen.append(int(logits.argmax()))
        return chosen

    def generate(self, prompts: list[list[int]], lens: list[int]) -> None:
        """Prompts in pieces that fill a batch beside the sequences that decode."""
        clear(self.context)
        done, made, last = [0] * len(prompts), [0] * len(prompts), [0] * len(prompts)
        while any(count < wanted for count, wanted in zip(made, lens, strict=True)):
            work, owners = [], []
            for i, prompt in enumerate(prompts):
                if done[i] == len(prompt) and made[i] < lens[i]:
                    work.append((last[i], len(prompt) + made[i] - 1, i, True))
                    owners.append(i)
            for i, prompt in enumerate(prompts):
                piece = prompt[done[i] : done[i] + BATCH - len(work)]
                for token in piece:
                    work.append((token, done[i], i, done[i] == len(prompt) - 1))
                    done[i] += 1
                if piece and done[i] == len(prompt):
                    owners.append(i)
            for owner, token in zip(owners, self.step(work), strict=True):
                last[owner] = token
                made[owner] += 1


def main() -> None:
    path, *rest = (word for word in sys.argv[1:] if word not in (REPACK, FLASH))
    threads = int(rest[0]) if rest else os.cpu_count() or 1
    repacks, flash = REPACK in sys.argv, FLASH in sys.argv
    if (repacks or flash) and not IS_IK:
        sys.exit(f"{REPACK} and {FLASH} are of ik_llama.cpp; llama.cpp does both by itself")
    serve(Llama(path, threads, repacks=repacks, flash=flash).generate)


if __name__ == "__main__":
    main()
