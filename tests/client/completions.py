"""A completion without a client, for tests that push its tokens themselves."""

from __future__ import annotations

from tests.text.tokens import byte_tokenizer
from weft.client.generation import Completion, CompletionSpec, Generation
from weft.messages.sampling import SamplingParams
from weft.observe.metrics import Metrics
from weft.text.stop.stopping import Stops

TOKENIZER = byte_tokenizer()
METRICS = Metrics()


def make_completion(params: SamplingParams, *, stream_interval: int = 1) -> Completion:
    """The only completion of a generation that streams."""
    spec = CompletionSpec(
        id=1,
        choice=0,
        rid="r",
        prompt_len=1,
        params=params,
        latency=METRICS.completions.latencies[0],
        stream_interval=stream_interval,
    )
    generation = Generation(stream=True, on_close=lambda generation: None)
    return Completion(spec, generation, TOKENIZER.detokenizer(), Stops(params).matcher())
