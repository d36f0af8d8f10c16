"""llama.cpp or ik_llama.cpp reads texts. read_llama.py FILE.gguf [threads]

A command is a line of token ids; the answer is a line `@@ N` and then, of every place between two tokens, the logits of
all N tokens of the vocabulary as float32 bytes.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from engine import ANSWER
from llama_package import clear, ll


def main() -> None:
    threads = int(sys.argv[2]) if len(sys.argv) > 2 else os.cpu_count() or 1
    ll.llama_backend_init()
    model = ll.llama_model_load_from_file(sys.argv[1].encode(), ll.llama_model_default_params())
    vocab_size = ll.llama_vocab_n_tokens(ll.llama_model_get_vocab(model))
    params = ll.llama_context_default_params()
    params.n_ctx = params.n_batch = 2048
    params.n_threads = params.n_threads_batch = threads
    context = ll.llama_init_from_model(model, params)
    batch = ll.llama_batch_init(2048, 0, 1)
    answers = sys.stdout.buffer
    for line in sys.stdin:
        tokens = [int(text) for text in line.split()]
        clear(context)
        batch.n_tokens = len(tokens) - 1
        for place, token in enumerate(tokens[:-1]):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = True
        if ll.llama_decode(context, batch):
            sys.exit("llama_decode failed")
        answers.write(f"{ANSWER}{vocab_size}\n".encode())
        for place in range(len(tokens) - 1):
            logits = ll.llama_get_logits_ith(context, place)
            answers.write(np.ctypeslib.as_array(logits, (vocab_size,)).tobytes())
        answers.flush()


if __name__ == "__main__":
    main()
