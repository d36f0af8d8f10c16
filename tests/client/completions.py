"""A completion without a client, for tests that push its tokens themselves."""

from __future__ import annotations

from collections.abc import Sequence

from tests.text.tokens import byte_tokenizer
from weft.client.front_times import FrontTimes
from weft.client.generation import Completion, CompletionSpec, Generation
from weft.client.requests import pack_ids
from weft.messages.requests import GenerateRequest
from weft.messages.sampling import SamplingParams
from weft.observe.metrics import Metrics
from weft.text.stop.stopping import Stops

TOKENIZER = byte_tokenizer()
METRICS = Metrics()
VOCAB_SIZE = 300


def make_completion(
    params: SamplingParams, *, stream_interval: int = 1, background: bool = False
) -> Completion:
    """The only completion of a generation that streams."""
    spec = CompletionSpec(
        request=GenerateRequest(id=1, rid="r", sampling=params, background=background),
        choice=0,
        prompt_len=1,
        latency=METRICS.completions.latencies[0],
        started_s=0.0,
        arrived_s=0.0,
        front=FrontTimes(0.0),
        stream_interval=stream_interval,
    )
    generation = Generation(stream=True, on_close=lambda generation: None)
    return Completion(spec, generation, TOKENIZER.detokenizer(), Stops(params).matcher())


def make_request(
    ids: Sequence[int], sampling: SamplingParams, rid: str = "r", group: str = ""
) -> GenerateRequest:
    """A request without a number, as the server makes it."""
    input_ids = pack_ids(ids, VOCAB_SIZE)
    return GenerateRequest(rid=rid, input_ids=input_ids, sampling=sampling, group=group)
