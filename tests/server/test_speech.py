"""Transcripts over HTTP, before a tiny Whisper with all the files of a checkpoint: tokens, times
and segments are those that transformers computes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import numpy as np
import pytest
import torch

from tests.models import speaking
from tests.models.speaking import IDS, RATE, SpeechModel
from tests.seeds import slow
from tests.server.real_engine import RealServer, serving
from weft.arrays import FloatArray
from weft.config.limits import Limits

FIRST_TIME = IDS["<|0.00|>"]
END = 257
TIMES = range(FIRST_TIME, FIRST_TIME + speaking.NUM_POSITIONS + 1)
# A model with random weights writes times where it should not.
NO_TIMES = [*speaking.SUPPRESSED, *TIMES]
WORDS_AND_SEGMENTS: dict[str, Any] = {"timestamp_granularities[]": ["word", "segment"]}


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
    # Such a model often speaks as long as it can.
    checkpoint = speaking.make(tmp_path_factory.mktemp("spoken"), max_target_positions=56)
    limits = Limits(max_speech_s=20)
    with serving(checkpoint.folder, limits, dtype="float32") as server:
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


@pytest.mark.parametrize("length", [50_000, 72_345, *slow([32_000, 128_000])])
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
            **WORDS_AND_SEGMENTS,
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


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    lines = [line for line in answer.text.split("\n\n") if line]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("length", [20_000, 70_000])
def test_a_stream_has_the_text_of_the_whole_answer(spoken: Spoken, length: int) -> None:
    samples = speaking.sound(length)
    whole = spoken.ask(samples, language="en", temperature="0").json()
    *deltas, done = events_of(spoken.ask(samples, language="en", temperature="0", stream="true"))
    assert len(deltas) > 1
    assert {one["type"] for one in deltas} == {"transcript.text.delta"}
    assert done["type"] == "transcript.text.done"
    assert done["text"] == whole["text"] == "".join(one["delta"] for one in deltas).strip()
    assert done["usage"] == {"type": "duration", "seconds": length / RATE}


def test_the_time_of_a_window_begins_when_it_is_asked_for(spoken: Spoken) -> None:
    fronts = spoken.server.client.fronts
    before = set(fronts)
    spoken.ask(speaking.sound(70_000), language="en", temperature="0", response_format="srt")
    arrivals = [front.arrived_s for id, front in fronts.items() if id not in before]
    assert len(arrivals) > 1
    assert len(set(arrivals)) == len(arrivals)


def test_the_language_is_the_one_that_transformers_detects(spoken: Spoken) -> None:
    names = {"en": "english", "de": "german", "fr": "french"}
    for seed in range(4):
        samples = speaking.sound(32_000, seed)
        features = spoken.checkpoint.features(speaking.heard(samples))
        (id,) = spoken.checkpoint.model.detect_language(features).tolist()
        (code,) = [name for name in speaking.LANGUAGES if IDS[f"<|{name}|>"] == id]
        answer = spoken.ask(samples, temperature="0", response_format="verbose_json").json()
        assert answer["language"] == names[code]
        asked = spoken.ask(samples, temperature="0", language=code).json()
        assert asked["text"] == spoken.ask(samples, temperature="0").json()["text"]


def test_a_translation_asks_for_one(spoken: Spoken) -> None:
    samples = speaking.sound(32_000, 1)
    spoken.server.seen.clear()
    answer = spoken.ask(samples, "translations", language="de", temperature="0")
    assert answer.status_code == 200
    prompts = [np.frombuffer(one.input_ids, np.int32).tolist() for one in spoken.server.seen]
    names = ("<|startoftranscript|>", "<|de|>", "<|translate|>", "<|notimestamps|>")
    assert prompts == [[IDS[name] for name in names]]
    verbose = spoken.ask(
        samples, "translations", language="german", temperature="0", response_format="verbose_json"
    )
    assert verbose.json()["task"] == "translate"


def test_a_prompt_comes_before_the_first_window(spoken: Spoken) -> None:
    spoken.server.seen.clear()
    samples = speaking.sound(20_000)
    assert spoken.ask(samples, language="en", temperature="0", prompt="Hello").is_success
    (message,) = spoken.server.seen
    prompt = np.frombuffer(message.input_ids, np.int32).tolist()
    assert prompt[: 1 + len(" Hello")] == [IDS["<|startofprev|>"], *b" Hello"]


def test_captions_have_the_times_of_segments(spoken: Spoken) -> None:
    samples = speaking.sound(50_000, 2)
    asked = {"language": "en", "temperature": "0"}
    segments = spoken.ask(samples, response_format="verbose_json", **asked).json()["segments"]
    vtt = spoken.ask(samples, response_format="vtt", **asked).text
    srt = spoken.ask(samples, response_format="srt", **asked).text
    assert vtt.startswith("WEBVTT\n\n")
    assert vtt.count("-->") == srt.count("-->") == len(segments)
    start = f"00:00:{segments[0]['start']:06.3f}"
    assert f"{start} --> " in vtt
    assert f"1\n{start.replace('.', ',')} --> " in srt


def test_without_a_temperature_an_answer_that_looks_wrong_is_tried_again(spoken: Spoken) -> None:
    samples = speaking.sound(32_000, 5)
    spoken.server.seen.clear()
    answer = spoken.ask(samples, language="en", response_format="verbose_json")
    tried = [one.sampling.temperature for one in spoken.server.seen if one.sampling.speech]
    assert tried[0] == 0.0
    for segment in answer.json()["segments"]:
        assert segment["temperature"] in tried
        assert 0 <= segment["no_speech_prob"] <= 1
    # The same sound gets the same answer.
    again = spoken.ask(samples, language="en", response_format="verbose_json")
    assert again.json() == answer.json()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": "xml"}, "response_format is 'xml'; allowed: json, text, srt, vtt,"),
        ({"language": "klingon"}, "language is 'klingon'; allowed: de, en, fr"),
        ({"temperature": "hot"}, "temperature is 'hot'; 0 to 2 are allowed"),
        ({"temperature": "nan"}, "temperature is 'nan'; 0 to 2 are allowed"),
        ({"timestamp_granularities[]": "hour"}, "timestamp_granularities is 'hour'; allowed:"),
        ({"timestamp_granularities[]": "word"}, "needs response_format verbose_json"),
        ({"stream": "perhaps"}, "stream is 'perhaps'; true or false is expected"),
        ({"stream": "true", "response_format": "srt"}, "a stream is json or text"),
        ({"timeout_ms": "0"}, "timeout_ms is '0'; an integer from 1 to"),
        ({"prompt": "<|de|>"}, "prompt has special tokens of the model"),
        ({"include[]": "logprobs"}, "include[] is not supported"),
        ({"prompt": "x" * 5_000}, "the form cannot be read"),
    ],
)
def test_a_wrong_field_is_one_clear_error(
    spoken: Spoken, fields: dict[str, str], message: str
) -> None:
    answer = spoken.ask(speaking.sound(8_000), **fields)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


def test_sounds_that_are_wrong_are_one_clear_error(spoken: Spoken) -> None:
    good = speaking.wav(speaking.sound(8_000))
    cases = {
        b"": "no known format",
        good[:60]: "",
        good[:-2_000]: "",
        b"RIFF" + bytes(100): "",
        b"\xff\xfb" + bytes(50): "",
        speaking.wav(speaking.sound(800), channels=32): "32 channels; at most 8",
        speaking.wav(speaking.sound(800), rate=1_000): "1000 samples a second; from 4000",
        speaking.wav(np.zeros(0, np.float32)): "empty",
    }
    for raw, message in cases.items():
        answer = spoken.ask(raw, language="en", temperature="0")
        assert answer.status_code == 400, raw[:20]
        assert message in answer.json()["error"]["message"]
    long = spoken.ask(speaking.wav(np.zeros(8_000 * 21, np.float32), rate=8_000))
    assert long.status_code == 400
    assert "more than 20 s, which --max-speech-s allows" in long.json()["error"]["message"]
    page = spoken.server.wait(spoken.server.http.get("/metrics")).text
    assert 'weft:refused_total{limit="max_speech_s"} 1' in page
    no_file = spoken.server.http.post("/v1/audio/transcriptions", data={"model": "tiny"})
    assert spoken.server.wait(no_file).status_code == 415
    another = spoken.ask(good, model="another")
    assert another.status_code == 404


@pytest.mark.parametrize("length", [1, 16_000])
def test_silence_and_the_shortest_sound_are_served(spoken: Spoken, length: int) -> None:
    silent = np.zeros(length, np.float32)
    assert spoken.ask(silent, language="en", temperature="0").status_code == 200
    verbose = {
        "response_format": "verbose_json",
        "timestamp_granularities[]": "word",
        "temperature": "0",
    }
    assert spoken.ask(silent, language="en", **verbose).status_code == 200


def test_many_at_once_get_what_each_gets_alone(spoken: Spoken) -> None:
    sounds = [speaking.sound(20_000 + 4_000 * seed, seed) for seed in range(6)]
    fields = {"language": "en", "temperature": "0", "response_format": "verbose_json"}
    alone = [spoken.ask(samples, **fields).json() for samples in sounds]

    async def all_together() -> list[httpx.Response]:
        posts = [
            spoken.server.http.post(
                "/v1/audio/transcriptions",
                files={"file": ("sound.wav", speaking.wav(samples))},
                data={"model": "tiny", **fields},
            )
            for samples in sounds
        ]
        return await asyncio.gather(*posts)

    together = [answer.json() for answer in spoken.server.wait(all_together())]
    for mine, own in zip(together, alone, strict=True):
        assert mine["text"] == own["text"]
        tokens = [one["tokens"] for one in own["segments"]]
        assert [one["tokens"] for one in mine["segments"]] == tokens
