"""Tiny random models that take pictures or sounds, with all the files of a checkpoint, made and
saved by transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import AddedToken

from tests.models.gemma3n_media import AUDIO as GEMMA3N_AUDIO
from tests.models.gemma3n_media import without_timm
from tests.models.mobilenet import MODEL_ARGS, OUT_SIDE, SIDE
from tests.models.pictures import GEMMA4_AUDIO
from tests.models.sounds import VOXTRAL_AUDIO, VOXTRAL_TOKENS
from tests.text.tokens import EOS, IM_END, byte_backend

RATE = 16_000
FIRST = 260  # the id of the first token that a family adds to those of `byte_backend`
VOCAB = 288
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "tie_word_embeddings": False,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
TEMPLATE = (
    "{%% for m in messages %%}<|im_start|>{{ m.role }}\n"
    "{%% if m.content is string %%}{{ m.content }}{%% else %%}{%% for part in m.content %%}"
    "{%% if part.type == 'text' %%}{{ part.text }}{%% else %%}%s{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>\n{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>assistant\n{%% endif %%}"
)


class MediaModel(NamedTuple):
    """A saved model, and what transformers computes with."""

    folder: Path
    kind: str  # of what it takes: image, audio
    model: Any
    processor: Any

    def text(self, messages: list[dict[str, Any]]) -> str:
        """With the model's marks."""
        found: str = self.processor.tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
        return found

    def answer(self, messages: list[dict[str, Any]], items: Sequence[Any], count: int) -> list[int]:
        """`count` tokens by the greedy choice, of messages in which {"type": kind} stands for each
        of the items."""
        text = self.text(messages)
        named = {"images" if self.kind == "image" else "audio": list(items)} if items else {}
        inputs = self.processor(text=[text], return_tensors="pt", **named)
        with torch.inference_mode():
            found = self.model.generate(
                **inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        return [int(token) for token in found[0, inputs["input_ids"].shape[1] :]]


def tokenizer(mark: str, *names: str, **named: str) -> Any:
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=TEMPLATE % mark,
        extra_special_tokens=named,
    )


def saved(folder: Path, kind: str, model: Any, processor: Any) -> MediaModel:
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(
                1 + 0.2 * noise if "norm" in name and name.endswith("weight") else 0.25 * noise
            )
    model.eval().generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    if kind == "audio":
        processor.feature_extractor.save_pretrained(folder)
    else:
        processor.image_processor.save_pretrained(folder)
    return MediaModel(folder, kind, model, processor)


def without_videos(processor: Any) -> Any:
    """The class of a processor, which is content without a part for videos: that needs
    torchvision."""

    class WithoutVideos(processor):  # type: ignore[misc]
        def check_argument_for_proper_class(self, *_: Any) -> None:
            return None

    return WithoutVideos


def smolvlm(folder: Path, context: int = 1024) -> MediaModel:
    from transformers.models.smolvlm import processing_smolvlm
    from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

    processing_smolvlm.num2words = str  # a package that writes numbers of frames as words
    names = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    names += [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokens = tokenizer(
        "<image>",
        *names,
        image_token="<image>",
        fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
        end_of_utterance_token="<end_of_utterance>",
    )
    images = SmolVLMImageProcessorPil(
        size={"longest_edge": 64}, max_image_size={"longest_edge": 32}, do_image_splitting=True
    )
    config = transformers.SmolVLMConfig(
        text_config={"model_type": "llama", **TEXT, "max_position_embeddings": context},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        image_token_id=FIRST,
        scale_factor=2,
        pad_token_id=EOS,
    )
    model = transformers.SmolVLMForConditionalGeneration(config)
    processor = without_videos(transformers.SmolVLMProcessor)(images, tokens, None, image_seq_len=4)
    return saved(folder, "image", model, processor)


def qwen25_vl(folder: Path) -> MediaModel:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    tokens = tokenizer(mark, "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
    images = Qwen2VLImageProcessorPil(
        min_pixels=28 * 28 * 4, max_pixels=28 * 28 * 24, patch_size=14, merge_size=2
    )
    config = transformers.Qwen2_5_VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10_000.0,
                "mrope_section": [1, 1, 2],
            },
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": TEXT["hidden_size"],
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 56,
            "fullatt_block_indexes": [1],
            "hidden_act": "silu",
        },
        vision_start_token_id=FIRST,
        vision_end_token_id=FIRST + 1,
        image_token_id=FIRST + 2,
        video_token_id=FIRST + 3,
    )
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    processor = without_videos(transformers.Qwen2_5_VLProcessor)(images, tokens, None)
    return saved(folder, "image", model, processor)


def gemma3(folder: Path) -> MediaModel:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    mark = "<start_of_image>"
    tokens = tokenizer(
        mark,
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    images = Gemma3ImageProcessorPil(size={"height": 32, "width": 32})
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
        },
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        boi_token_index=FIRST,
        eoi_token_index=FIRST + 1,
        image_token_index=FIRST + 2,
    )
    model = transformers.Gemma3ForConditionalGeneration(config)
    processor = transformers.Gemma3Processor(images, tokens, image_seq_length=4)
    return saved(folder, "image", model, processor)


def gemma4(folder: Path) -> MediaModel:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    sounds = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokens = tokenizer("<|image|>", *names.values(), *sounds.values(), **names, **sounds)
    sizes = {"patch_size": 4, "pooling_kernel_size": 2}
    images = Gemma4ImageProcessorPil(**sizes, max_soft_tokens=70)
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
            "use_bidirectional_attention": "vision",
        },
        vision_config={**VISION, **sizes, "num_key_value_heads": 4, "head_dim": 8},
        boi_token_id=FIRST,
        eoi_token_id=FIRST + 1,
        image_token_id=FIRST + 2,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    processor = without_videos(transformers.Gemma4Processor)(None, images, tokens, None)
    return saved(folder, "image", model, processor)


def gemma4_sounds(folder: Path) -> MediaModel:
    """Without an encoder of pictures."""
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    names = {"boi_token": "<|image>", "eoi_token": "<image|>", "image_token": "<|image|>"}
    sounds = {"boa_token": "<|audio>", "eoa_token": "<audio|>", "audio_token": "<|audio|>"}
    tokens = tokenizer("<|audio|>", *sounds.values(), *names.values(), **sounds, **names)
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "global_head_dim": 16,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB,
        },
        vision_config=None,
        audio_config={**GEMMA4_AUDIO, "use_clipped_linears": False},
        audio_token_id=FIRST + 2,
    )
    model = transformers.Gemma4ForConditionalGeneration(config)
    extractor = Gemma4AudioFeatureExtractor(feature_size=16)
    processor = without_videos(transformers.Gemma4Processor)(extractor, None, tokens, None)
    return saved(folder, "audio", model, processor)


def gemma3n(folder: Path, kind: str = "image") -> MediaModel:
    """`kind`: of what the model takes; for transformers it has both encoders."""
    from transformers.models.gemma3n.feature_extraction_gemma3n import Gemma3nAudioFeatureExtractor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    ids = {"boi": FIRST, "boa": FIRST + 1}
    ids |= {"eoi": FIRST + 2, "image": FIRST + 3}  # tokens for pictures
    ids |= {"eoa": FIRST + 4, "audio": FIRST + 5}  # tokens for sounds, up to the last of all
    named = {f"{name}_token": f"<{name}>" for name in ids}
    tokens = tokenizer(f"<{kind}>", *named.values(), **named)
    for name in ids:
        setattr(tokens, f"{name}_token_id", ids[name])
    config = transformers.Gemma3nConfig(
        text_config={
            **TEXT,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 256,
            "pad_token_id": 0,
            "num_kv_shared_layers": 0,
            "intermediate_size": [80] * 3,
            "activation_sparsity_pattern": [0.5, 0.0, 0.0],
            "laurel_rank": 8,
        },
        vision_config={
            "vocab_size": 2,
            "vocab_offset": ids["eoi"],
            "model_args": MODEL_ARGS,
        },
        audio_config={
            **GEMMA3N_AUDIO,
            "vocab_size": VOCAB - ids["eoa"],
            "vocab_offset": ids["eoa"],
        },
        vision_soft_tokens_per_image=OUT_SIDE**2,
        audio_soft_tokens_per_image=188,
        **{f"{name}_token_id": id for name, id in ids.items()},
    )
    model = without_timm(config)
    both = {"feature_size": GEMMA3N_AUDIO["input_feat_size"]}
    images = SiglipImageProcessorPil(size={"height": SIDE, "width": SIDE}, **both)
    lengths = {"audio_seq_length": 188, "image_seq_length": OUT_SIDE**2}
    processor = without_videos(transformers.Gemma3nProcessor)(
        Gemma3nAudioFeatureExtractor(**both), images, tokens, **lengths
    )
    found = saved(folder, kind, model, processor)
    # Tokens for pictures and sounds are not written: their vectors are not those of the text.
    with torch.no_grad():
        model.get_output_embeddings().weight[ids["eoi"] :] = 0
    model.save_pretrained(folder)
    # Served, it has the encoder of that kind alone.
    path = folder / "config.json"
    config_json = json.loads(path.read_text())
    del config_json["vision_config" if kind == "audio" else "audio_config"]
    path.write_text(json.dumps(config_json))
    return found


def gemma3n_sounds(folder: Path) -> MediaModel:
    return gemma3n(folder, "audio")


def qwen2_audio(folder: Path) -> MediaModel:
    mark = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    tokens = tokenizer(mark, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>")
    config = transformers.Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **TEXT},
        audio_config={
            "num_mel_bins": 16,
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "max_source_positions": 50,
        },
        audio_token_index=FIRST,
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    processor = transformers.Qwen2AudioProcessor(sounds, tokens)
    return saved(folder, "audio", model, processor)


class VoxtralInputs:
    """What `VoxtralProcessor` makes, whose own chats and marks need the package mistral-common."""

    def __init__(self, tokenizer: Any, extractor: Any) -> None:
        self.tokenizer = tokenizer
        self.feature_extractor = extractor

    def __call__(
        self, text: list[str], return_tensors: str, audio: Sequence[Any] = ()
    ) -> dict[str, Any]:
        from transformers.models.voxtral.processing_voxtral import VoxtralProcessor

        settings = {**VoxtralProcessor.audio_kwargs, "pad_to_multiple_of": RATE}
        settings |= {"max_source_positions": RATE // 160}
        (told,) = text
        windows = []
        for samples in audio:
            made = VoxtralProcessor._retrieve_input_features(self, [samples], **settings)
            windows.append(made)
            told = told.replace(
                "[AUDIO]", "[BEGIN_AUDIO]" + "[HERE]" * VOXTRAL_TOKENS * len(made), 1
            )
        ids = self.tokenizer(told.replace("[HERE]", "[AUDIO]"), return_tensors=return_tensors)
        if windows:
            return {"input_ids": ids["input_ids"], "input_features": torch.cat(windows)}
        return {"input_ids": ids["input_ids"]}


def voxtral(folder: Path) -> MediaModel:
    tokens = tokenizer("[AUDIO]", "[AUDIO]", "[BEGIN_AUDIO]")
    config = transformers.VoxtralConfig(
        text_config={"model_type": "llama", **TEXT, "rms_norm_eps": 1e-5},
        audio_config=VOXTRAL_AUDIO,
        audio_token_id=FIRST,
    )
    model = transformers.VoxtralForConditionalGeneration(config)
    sounds = transformers.WhisperFeatureExtractor(feature_size=16, chunk_length=1)
    return saved(folder, "audio", model, VoxtralInputs(tokens, sounds))


MODELS = {
    "smolvlm": smolvlm,
    "qwen2.5-vl": qwen25_vl,
    "gemma3": gemma3,
    "gemma3n": gemma3n,
    "gemma4": gemma4,
    "gemma4-sounds": gemma4_sounds,
    "qwen2-audio": qwen2_audio,
    "voxtral": voxtral,
}
assert IM_END == FIRST - 1
