"""An adder of prompts alone, with its memory."""

from __future__ import annotations

import numpy as np

from weft.memory.allocator import PageAllocator, RowTable
from weft.memory.radix.cache import RadixCache
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.scheduler.admission import PrefillAdder
from weft.scheduler.kv import KvMemory
from weft.scheduler.request import Columns, Request


def make_kv(num_pages: int, page_size: int) -> KvMemory:
    columns = Columns(8, 8192)
    return KvMemory(
        RowTable(8, 8192, page_size),
        PageAllocator(num_pages, page_size),
        RadixCache(page_size),
        columns,
    )


def make_request(kv: KvMemory, prompt_len: int, max_new: int, first: int = 0) -> Request:
    packed = np.arange(first, first + prompt_len, dtype=np.int32).tobytes()
    message = GenerateRequest(id=first, rid=str(first), input_ids=packed, sampling=SamplingParams())
    request = Request(message, max_len=prompt_len + max_new, seed=0, arrival_order=0, arrival_s=0.0)
    kv.prefixes.match(request)
    return request


def make_adder(kv: KvMemory, **changes: object) -> PrefillAdder:
    values = {
        "reserved": 0.0,
        "mixed_tokens": 0,
        "mixed_kv": 0,
        "max_prefill_tokens": 1000,
        "chunked_prefill_size": None,
        "is_alone": False,
        **changes,
    }
    return PrefillAdder(kv, **values)  # type: ignore[arg-type]
