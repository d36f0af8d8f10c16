"""Gemma 3n's encoders of pictures and sounds compared with transformers on a tiny random
checkpoint; and log probabilities of tokens behind both: whole, in chunks, cached and retracted."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import mobilenet
from tests.models.gemma3n_media import (
    AUDIO,
    NUM_BANDS,
    NUM_PICTURE_TOKENS,
    NUM_SOUND_TOKENS,
    OUTER,
    TEXT,
    VISION,
    Heard,
    Prompt,
    Seen,
    assert_told,
    frames,
    heard_inputs_of,
    make_gemma3n,
    pixels,
)
from tests.models.gemma4_media import IN_FOUR_WAYS, loaded
from tests.models.many import Checkpoint
from tests.models.media_checks import (
    assert_all_told,
    assert_found_again,
    assert_matrices_count,
    assert_retracted_go_on,
    assert_weights_come_back,
    backends,
)
from weft.config.model_errors import ModelError
from weft.config.vision.gemma3n import gemma3n_towers
from weft.config.vision.mobilenet import MobileNetSpec
from weft.models.vision.tower import TowerInput, at_once

# Frames of one vector and of all, with all frames of the last vector and with one.
LENGTHS = [1, 16, 17, 50, 96]
ENDED_SOUND = NUM_SOUND_TOKENS + 1
ENDED_PICTURE = NUM_PICTURE_TOKENS + 1


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_gemma3n(tmp_path_factory.mktemp("gemma3n"))


def test_vectors_of_pictures_are_those_of_transformers(model: Checkpoint) -> None:
    for backend in backends():
        tower = loaded(model, backend)
        for side in mobilenet.SIDES:
            values = torch.from_numpy(pixels(side))
            with torch.inference_mode():
                found = model.model.model.get_image_features(values[None])
                given = TowerInput("image", ENDED_PICTURE, None, values)
                vectors = at_once(tower.encode(given)).float()
                end = model.model.model.embed_vision(torch.tensor([[OUTER["eoi_token_id"]]]))
            wanted = torch.cat((found.pooler_output[0], end[0]))
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors, wanted, rtol=1e-4, atol=2e-5)
        for shape in ((3, 32, 64), (3, 48, 48), (1, 32, 32)):
            wrong = TowerInput("image", ENDED_PICTURE, None, torch.zeros(shape))
            with pytest.raises(ValueError, match="reads squares of a multiple of 32 pixels"):
                at_once(tower.encode(wrong))


def test_vectors_of_sounds_are_those_of_transformers(model: Checkpoint) -> None:
    inner = model.model.model
    for backend in backends():
        tower = loaded(model, backend)
        for length in LENGTHS:
            values = frames(length)
            inputs = heard_inputs_of(values)
            with torch.inference_mode():
                found = inner.get_audio_features(
                    inputs["input_features"], ~inputs["input_features_mask"]
                )
                wanted = found.pooler_output[0]
                given = TowerInput("audio", ENDED_SOUND, None, torch.from_numpy(values))
                vectors = at_once(tower.encode(given)).float()
                others = torch.tensor([[TEXT["vocab_size"] - 1, OUTER["eoa_token_id"]]])
                filling, end = inner.embed_audio(others)[0]
            assert wanted.abs().max() > 0.1
            torch.testing.assert_close(vectors[: len(wanted)], wanted, rtol=1e-4, atol=2e-5)
            torch.testing.assert_close(vectors[-1], end, rtol=1e-4, atol=2e-5)
            for vector in vectors[len(wanted) : -1]:
                torch.testing.assert_close(vector, filling, rtol=1e-4, atol=2e-5)
        for shape in ((97, NUM_BANDS), (8, 3), (0, NUM_BANDS)):
            wrong = TowerInput("audio", ENDED_SOUND, None, torch.zeros(shape))
            with pytest.raises(ValueError, match=rf"tokens has the shape \[{shape[0]}, {shape[1]}"):
                at_once(tower.encode(wrong))


def test_weights_are_given_back_as_they_came(model: Checkpoint) -> None:
    tower = loaded(model, backends()[1])
    assert_weights_come_back(model, tower, lambda name: "language_model" not in name, atol=1e-7)
    assert_matrices_count(model, tower, "image", "audio")


def test_the_released_network_has_as_many_weights_as_that_of_timm() -> None:
    spec = MobileNetSpec()
    assert list(map(len, spec.levels)) == [3, 5, 37, 39]
    assert spec.num_parameters == 293_841_472
    assert spec.side_step == 256


PICTURE = Seen(1, 32)
SHORT = Heard(1, 20)
LONG = Heard(2, 90)
PROMPTS = [Prompt(1, 5, SHORT, 9), Prompt(2, LONG, 7, PICTURE, 4), Prompt(3, 2, PICTURE, LONG, 1)]


@IN_FOUR_WAYS
def test_log_probabilities_are_those_of_transformers(
    model: Checkpoint, settings: dict[str, Any]
) -> None:
    assert_all_told(model, PROMPTS, assert_told, 3, **settings)


def test_what_was_seen_and_heard_is_found_in_the_cache(model: Checkpoint) -> None:
    changed = Prompt(2, LONG, 7, Seen(9, 32), 4), ENDED_SOUND + 7
    assert_found_again(model, PROMPTS[1], [changed], assert_told, 3)


def test_retracted_requests_go_on_with_the_same_media(model: Checkpoint) -> None:
    assert_retracted_go_on(model, PROMPTS, assert_told)


def config_with(**changes: Any) -> dict[str, Any]:
    config = {**OUTER, "text_config": TEXT, "vision_config": VISION, "audio_config": AUDIO}
    for key, value in changes.items():
        section = next((one for one in ("vision", "audio") if key.startswith(f"{one}__")), "")
        if section:
            name = key.removeprefix(f"{section}__")
            config[f"{section}_config"] = {**config[f"{section}_config"], name: value}
        else:
            config[key] = value
    return config


def with_block(**changes: Any) -> dict[str, Any]:
    args: dict[str, Any] = deepcopy(mobilenet.MODEL_ARGS)
    args["block_args"][1][0] |= changes
    return args


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"audio__conf_attention_context_right": 2}, "conf_attention_context_right"),
        ({"audio__gradient_clipping": 10.0}, "gradient_clipping of 10; at least 1e"),
        ({"audio__sscp_conv_channel_size": [4]}, r"\[4\]; two numbers up to 4,096"),
        ({"audio__conf_num_attention_heads": 5}, "48 numbers for 5 heads that see 6"),
        ({"audio__vocab_offset": 3}, "12 tokens from 3 on, of which the last"),
        ({"audio__vocab_size": 9_999}, "vocab_size of an encoder is 9,999"),
        ({"audio_soft_tokens_per_image": 9_999}, "is 9,999; at most 4,096"),
        ({"image_token_id": 5}, "image_token_id is 5; it must be at least 320"),
        ({"vision_soft_tokens_per_image": 9}, "is 9; the encoder makes 4 x 4 vectors"),
        ({"vision__architecture": "resnet50"}, "architecture is resnet50"),
        ({"vision__model_args": {"depth": 3}}, "model_args has 'depth'"),
        ({"vision__model_args": {"stem_size": 9}}, "stem_size is 9; a multiple of 8"),
        ({"vision__model_args": {"msfa_output_resolution": 5}}, "is 5 after 4 levels"),
        ({"vision__model_args": {"block_args": [[]]}}, "block_args has 1 levels"),
        ({"vision__model_args": {"block_args": [[3], [3]]}}, "block_args has 3; a block"),
        ({"vision__model_args": with_block(block_type="ir")}, "block_type is 'ir'"),
        ({"vision__model_args": with_block(stride=1)}, "a stride of 1; the first block"),
        ({"vision__model_args": with_block(dw_kernel_size_mid=0)}, "has no dw_kernel_size_mid"),
        ({"vision__model_args": with_block(dw_kernel_size_mid=4)}, "is 4; an odd number up to 15"),
        ({"vision__model_args": with_block(exp_ratio=1.5)}, "exp_ratio is 1.5; a number from 1"),
        ({"vision__model_args": with_block(se_ratio=0.25)}, "se_ratio is 0.25"),
    ],
)
def test_encoders_of_other_kinds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gemma3n_towers(config_with(**changes), 64)


def test_a_model_without_an_encoder_has_the_other_alone() -> None:
    for kind, other in (("vision", "audio"), ("audio", "image")):
        spec = gemma3n_towers(config_with(**{f"{kind}_config": None}), 64)
        assert spec is not None
        assert spec.kinds == (other,)
    assert gemma3n_towers({}, 64) is None


def test_the_network_is_that_of_timm(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    theirs = timm.create_model(
        "mobilenetv5_300m_enc", num_classes=0, **deepcopy(mobilenet.MODEL_ARGS)
    )
    ours = mobilenet.MobileNet()
    ours.load_state_dict(theirs.state_dict())
    for side in mobilenet.SIDES:
        picture = torch.from_numpy(pixels(side))[None]
        with torch.inference_mode():
            torch.testing.assert_close(ours(picture), theirs.forward_features(picture))
