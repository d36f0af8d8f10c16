"""Engines that serve tiny models with pictures: greedy tokens are those of transformers, and the
same whatever happens to a request on its way."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import numpy as np
import pytest
import torch

from tests.models.many import Checkpoint
from tests.models.pictures import IMAGE_TOKEN, PICTURES, make_with_pictures
from tests.models.seeing import NUM_NEW, Prompt, SeeingServed
from tests.scheduler.accounts import audit
from weft.messages.media import MediaItem
from weft.messages.requests import Abort, GenerateRequest
from weft.messages.sampling import SamplingParams

NAMES = ["gemma3", "llava", "smolvlm"]


@lru_cache(maxsize=16)
def expected(checkpoint: Checkpoint, prompt: Prompt) -> list[int]:
    """Greedily, by transformers."""
    model = checkpoint.model
    pixels = torch.from_numpy(np.stack(prompt.pixels))
    if "SmolVLM" in type(model).__name__ or "Idefics3" in type(model).__name__:
        pixels = pixels[None]
    more: dict[str, Any] = {}
    ids = list(prompt.ids)
    for _ in range(NUM_NEW):
        if "Gemma3" in type(model).__name__:
            types = [int(id == IMAGE_TOKEN) for id in ids]
            more["token_type_ids"] = torch.tensor([types])
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels, **more).logits
        ids.append(int(logits[0, -1].argmax()))
    return ids[len(prompt.ids) :]


@pytest.fixture(scope="module", params=NAMES)
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    assert request.param in PICTURES
    text: dict[str, Any] = {}
    if request.param == "gemma3":
        # Pictures are longer than the part of them that a window ends in.
        text = {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]}
    return make_with_pictures(request.param, tmp_path_factory.mktemp("seeing"), **text)


@cache  # what transformers says to them is computed once
def prompts_of(checkpoint: Checkpoint) -> list[Prompt]:
    folder = checkpoint.folder
    return [
        Prompt(folder, 1, 5, 101, 9),
        Prompt(folder, 2, 3, 101, 7, 102, 4),
        # Transformers lets neighbours see each other as if they were one picture.
        Prompt(folder, 3, 102, 2, 102, 30, 103, 1),
    ]


@pytest.mark.parametrize(
    "settings", [{}, {"kernels": "torch", "chunked_prefill_size": -1}], ids=["kernels", "torch"]
)
def test_tokens_are_those_of_transformers(seeing: Checkpoint, settings: dict[str, Any]) -> None:
    served = SeeingServed(seeing.folder, **settings)
    prompts = prompts_of(seeing)
    text = served.send(prompts[0].ids[:5] * 3, NUM_NEW)
    outputs = served.serve(*prompts)
    assert outputs == [expected(seeing, prompt) for prompt in prompts]
    assert len(served.outputs[text]) == NUM_NEW
    assert served.num_runs == 3


@pytest.mark.pairs
@pytest.mark.parametrize("chunk", [1, 7, 16])
@pytest.mark.parametrize("overlap", [False, True])
def test_pieces_of_pictures_are_as_good_as_whole_ones(
    seeing: Checkpoint, chunk: int, overlap: bool
) -> None:
    prompts = prompts_of(seeing)
    cut = SeeingServed(
        seeing.folder,
        chunked_prefill_size=chunk,
        page_size=1,
        overlap=overlap,
        max_encoder_tokens=1,
    )
    assert cut.serve(*prompts) == [expected(seeing, prompt) for prompt in prompts]
    assert cut.num_runs == 3


def test_a_picture_that_was_seen_needs_no_encoder(seeing: Checkpoint) -> None:
    served = SeeingServed(seeing.folder, page_size=1)
    first = prompts_of(seeing)[1]
    (once,) = served.serve(first)
    assert served.num_runs == 2
    assert served.serve(first) == [once]
    assert served.cached[1] == len(first.ids) - 1
    assert served.num_runs == 2
    # Behind another text its K and V are other ones, and its vectors the same.
    other = Prompt(seeing.folder, 9, 8, 101, 3)
    assert served.serve(other) == [expected(seeing, other)]
    assert served.cached[2] == 0
    assert served.num_runs == 2
    # One that differs is found up to its first token.
    changed = Prompt(seeing.folder, 2, 3, 104, 7, 102, 4)
    assert served.serve(changed) == [expected(seeing, changed)]
    assert served.cached[3] == 3
    assert served.num_runs == 3


def test_retracted_requests_go_on_as_if_nothing_had_happened(seeing: Checkpoint) -> None:
    prompts = prompts_of(seeing)
    # Drafts would end the requests within a few steps where a model repeats itself.
    served = SeeingServed(
        seeing.folder,
        prefix_cache=False,
        encoder_cache_tokens=1,
        overlap=False,
        speculative="off",
    )
    ids = [served.see(prompt) for prompt in prompts]
    scheduler = served.engine.scheduler
    num_steps = 0
    while served.engine.has_work:
        served.step()
        num_steps += 1
        if num_steps % 3 == 0:
            scheduler.merge_last_batch()
            for row in scheduler.running_batch.rows[:2].tolist():
                scheduler.retract(scheduler.kv.columns.requests[row])
    assert [served.outputs[id] for id in ids] == [expected(seeing, one) for one in prompts]
    assert scheduler.counters.num_retractions > 3
    assert served.num_runs > 3


def test_requests_that_are_aborted_anywhere_leave_nothing(seeing: Checkpoint) -> None:
    prompt = Prompt(seeing.folder, 5, 4, 105, 4, 106, 4)
    whole = expected(seeing, prompt)
    served = SeeingServed(seeing.folder, chunked_prefill_size=8, page_size=1)
    for num_steps in range(8):
        id = 100 + num_steps
        served.outputs[id] = []
        ids = np.array(prompt.ids, dtype=np.int32).tobytes()
        sampling = SamplingParams(max_new_tokens=NUM_NEW, temperature=0.0)
        message = GenerateRequest(
            id=id, rid=str(id), input_ids=ids, media=prompt.media, sampling=sampling
        )
        served.engine.submit(message)
        for _ in range(num_steps):
            served.engine.step()
        served.engine.submit(Abort(ids=(id,)))
        while served.engine.has_work:
            served.engine.step()
        feature = served.engine.services.features.media
        assert not feature.by_id
        assert not feature._rows
        assert not feature._taken
    assert served.serve(prompt) == [whole]


def test_a_broken_picture_ends_its_requests_alone(seeing: Checkpoint) -> None:
    served = SeeingServed(seeing.folder)
    good = prompts_of(seeing)[0]
    bad = Prompt(seeing.folder, 7, 2, 107, 5)
    broken = [item.values[:-4] for item in bad.media]
    item = bad.media[0]
    bad.media = (
        MediaItem(
            kind=item.kind,
            digest=item.digest,
            start=item.start,
            length=item.length,
            shape=item.shape,
            values=broken[0],
        ),
    )
    good_id = served.see(good)
    bad_id = served.see(bad)
    ended = {}
    while served.engine.has_work:
        for output in served.engine.step():
            for finish in getattr(output, "finished", ()):
                ended[finish.id] = finish
            for id, token in zip(
                np.frombuffer(getattr(output, "ids", b""), np.int64).tolist(),
                np.frombuffer(getattr(output, "tokens", b""), np.int32).tolist(),
                strict=True,
            ):
                served.outputs[id].append(token)
    assert served.outputs[good_id] == expected(seeing, good)
    assert ended[bad_id].reason == "error"
    assert "image encoder failed" in ended[bad_id].message
    assert not served.outputs[bad_id]
    audit(served.engine.scheduler)
