"""Transcripts over HTTP, before a tiny Whisper with all the files of a checkpoint: tokens, times and
segments are those that transformers computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
import torch

from tests.models import speaking
from tests.models.speaking import IDS, RATE, SpeechModel
from tests.server.real_engine import RealServer, serving
from weft.arrays import FloatArray

FIRST_TIME = IDS["<|0.00|>"]
END = 257
TIMES = range(FIRST_TIME, FIRST_TIME + speaking.NUM_POSITIONS + 1)
# A model with random weights writes times where it should not.
NO_TIMES = [*speaking.SUPPRESSED, *TIMES]


class Spoken(NamedTuple):
    checkpoint: SpeechModel
    server: RealServer

    def ask(
        self, samples: FloatArray | bytes, path: str = "transcriptions", **fields: Any
    ) -> httpx.Response:
        raw = samples if isinstance(samples, bytes) else speaking.wav(samples)
        return self.server.wait(
            self.server.http.post(
                f"/v1/audio/{path}",
                files={"file": ("sound.wav", raw)},
                data={"model": "tiny", **fields},
            )
        )

    def generated(self, samples: FloatArray, **options: Any) -> Any:
        """What transformers generates, greedily."""
        heard = speaking.heard(samples)
        extractor = self.checkpoint.processor.feature_extractor
        made = extractor(
            heard,
            sampling_rate=RATE,
            return_tensors="pt",
            truncation=False,
            padding="longest" if len(heard) > speaking.SECONDS * RATE else "max_length",
            return_attention_mask=True,
        )
        with torch.inference_mode():
            return self.checkpoint.model.generate(
                made.input_features,
                attention_mask=made.attention_mask,
                task="transcribe",
                language=options.pop("language", "en"),
                do_sample=False,
                **options,
            )

    def text(self, ids: list[int]) -> str:
        return str(self.checkpoint.processor.tokenizer.decode([id for id in ids if id < END]))


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spoken]:
    checkpoint = speaking.make(tmp_path_factory.mktemp("spoken"))
    with serving(checkpoint.folder, dtype="float32") as server:
        yield Spoken(checkpoint, server)


def told(ids: torch.Tensor) -> list[int]:
    """The ids up to the end."""
    found = [int(id) for id in ids]
    return found[: found.index(END)] if END in found else found


def test_a_text_is_that_of_transformers(spoken: Spoken) -> None:
    for length in (9_000, 31_000):
        samples = speaking.sound(length)
        there = told(spoken.generated(samples, suppress_tokens=NO_TIMES)[0])
        answer = spoken.ask(samples, language="en", temperature="0")
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"] == spoken.text(there).strip()
        assert answer.json()["usage"] == {"type": "duration", "seconds": length / RATE}
        plain = spoken.ask(samples, language="en", temperature="0", response_format="text")
        assert plain.text == spoken.text(there).strip() + "\n"


@pytest.mark.parametrize("length", [32_000, 50_000, 72_345, 128_000])
def test_segments_and_their_times_are_those_of_transformers(spoken: Spoken, length: int) -> None:
    samples = speaking.sound(length, seed=length)
    there = spoken.generated(
        samples, return_timestamps=True, return_segments=True, condition_on_prev_tokens=True
    )["segments"][0]
    answer = spoken.ask(
        samples, language="en", temperature="0", response_format="verbose_json"
    ).json()
    assert answer["language"] == "english"
    assert answer["task"] == "transcribe"
    assert answer["duration"] == pytest.approx(length / RATE, abs=1e-3)
    wanted = [one for one in there if any(int(id) < END for id in one["tokens"])]
    assert len(wanted) == len(answer["segments"])
    for number, (mine, own) in enumerate(zip(answer["segments"], wanted, strict=True)):
        ids = told(own["tokens"])
        if ids[-2:] == [ids[-1]] * 2 or (len(ids) > 2 and ids[-2] >= FIRST_TIME):
            ids = ids[:-1]  # with the beginning of a next segment that is not there
        assert mine["tokens"] == ids
        assert mine["id"] == number
        assert mine["start"] == pytest.approx(float(own["start"]), abs=0.011)
        assert mine["end"] == pytest.approx(float(own["end"]), abs=0.011)
        assert mine["text"] == spoken.text(ids)
    assert answer["text"] == "".join(one["text"] for one in answer["segments"]).strip()


def test_words_begin_and_end_when_transformers_says(spoken: Spoken) -> None:
    num_words = 0
    for length in (32_000, 55_000):
        samples = speaking.sound(length, seed=3)
        there = spoken.generated(
            samples,
            return_timestamps=True,
            return_token_timestamps=True,
            return_segments=True,
            condition_on_prev_tokens=True,
        )["segments"][0]
        answer = spoken.ask(
            samples,
            language="en",
            temperature="0",
            response_format="verbose_json",
            **{"timestamp_granularities[]": ["word", "segment"]},
        ).json()
        # The end of a token in time is what transformers keeps of it.
        ends = [
            (int(id), float(end))
            for one in there
            for id, end in zip(one["tokens"], one["token_timestamps"], strict=True)
        ]
        ends_of_text = [end for id, end in ends if id < END]
        spoken_ids = [id for id, _ in ends if id < END]
        assert [id for one in answer["segments"] for id in one["tokens"] if id < END] == spoken_ids
        # Each word ends with its last token.
        at = 0
        for word in answer["words"]:
            assert word["start"] <= word["end"]
            nearest = min(
                range(at, len(ends_of_text)), key=lambda i: abs(ends_of_text[i] - word["end"])
            )
            assert abs(ends_of_text[nearest] - word["end"]) <= 0.04
        assert answer["words"][-1]["end"] == pytest.approx(ends_of_text[-1], abs=0.04)
        num_words += len(answer["words"])
    assert num_words > 4
