"""Tokenizers made from the metadata of GGUF files give what transformers' own give."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from pydoc_data import topics
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from tests.executor.gguf_files import write_gguf
from tests.seeds import slow
from weft.text.gguf_tokenizer import PRE_TOKENIZERS, tokenizer_files
from weft.text.tokenizer import Tokenizer, TokenizerError

NUM_TEXTS = 10_000
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONTROL = 3
USER_DEFINED = 4
BYTE = 6

PIECES = (
    *("the", "Token", "I'm", "we'LL", "don't", "O'Neil", "'s", "'Ve", "HTTPServer", "snake_case"),
    *(" ", "  ", "   ", "\t", "\n", "\r\n", "\n\n", " \n ", "\u00a0", "\u2003", "\u200b", "\ufeff"),
    *("0", "7", "42", "1,234", "2024", "3.14159", "١٢٣", "Ⅷ", "½", "９", "1e-9", "0xFF"),
    *("é", "e\u0301", "naïve", "ÅÉ", "ß", "ǅ", "Ⅻ", "ﬁ", "İstanbul", "ﷺ", "a\u0303\u0323"),
    *("你好", "日本語テキスト", "한국어", "привет", "Ελλάδα", "שלום", "مرحبا", "नमस्ते", "ไทย"),
    *("😀", "👩‍👩‍👧", "🇫🇷", "\U0001f600\U0001f3fd", "𝕏", "\U00020000", "\x00", "\x7f", "\ufffd"),
    *(
        "!",
        "...",
        "?!",
        "(",
        ")]",
        "{}",
        "<html>",
        "//",
        "/*",
        "#include",
        "=>",
        "--",
        "$",
        "%",
        "`",
    ),
    *("def f(x):\n    return x", "print('a')", "<|im_start|>", "<|im_end|>", "<tool>", "▁", "<s>"),
)


@cache
def texts() -> list[str]:
    """Mixed strings, the same each time."""
    rng = random.Random(11)
    words = "\n".join(topics.topics.values()).split(" ")
    found = []
    for _ in range(NUM_TEXTS):
        parts = []
        for _ in range(rng.randint(0, 12)):
            parts.append(rng.choice(PIECES if rng.random() < 0.6 else words))
            if rng.random() < 0.5:
                parts.append(" ")
        found.append("".join(parts))
    return found


@cache
def trained() -> tuple[list[str], list[str]]:
    """Tokens and merges of a byte-level vocabulary. Words of several digits are among them."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3_000,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator([*topics.topics.values(), *texts()], trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(merge) for merge in model["merges"]]


def metadata(pre: str, **changes: Any) -> dict[str, Any]:
    tokens, merges = trained()
    tokens = [*tokens, "<tool>"]
    kinds = [CONTROL] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL) - 1) + [USER_DEFINED]
    found: dict[str, Any] = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    for key, value in changes.items():
        found[f"tokenizer.ggml.{key}"] = value
    return {key: value for key, value in found.items() if value is not None}


def made(values: dict[str, Any]) -> tokenizers.Tokenizer:
    files = tokenizer_files(values, "model.gguf")
    return tokenizers.Tokenizer.from_str(json.dumps(files["tokenizer.json"]))


def ids_of(backend: tokenizers.Tokenizer, num: int = NUM_TEXTS) -> list[list[int]]:
    encoded = backend.encode_batch(texts()[:num], add_special_tokens=False)
    return [encoding.ids for encoding in encoded]


def with_added(tokenizer: Any) -> tokenizers.Tokenizer:
    """A tokenizer of transformers that finds the special tokens in texts."""
    transformers = pytest.importorskip("transformers")
    token = transformers.AddedToken
    tokenizer.add_tokens([token(one, normalized=False, special=True) for one in SPECIAL])
    tokenizer.add_tokens([token("<tool>", normalized=False)])
    return tokenizer.backend_tokenizer


# As the makers' tokenizer.json files have them.
_LIKE_LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_O200K = "|".join(
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
_DEEPSEEK = (
    "\\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?"
    "[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
CASED = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd"
    "\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d"
    "\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec"
    "\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126"
    "\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184"
    "\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f"
    "\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
ENDINGS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
KIMI = "|".join(
    (
        r"""[\p{Han}]+""",
        f"{_BEFORE}{_UPPER}*{_LOWER}+{ENDINGS}?",
        f"{_BEFORE}{_UPPER}+{_LOWER}*{ENDINGS}?",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    )
)
EXPRESSIONS = {
    "deepseek-llm": (
        "[\r\n]",
        f"\\s?[{CASED}]+",
        "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
        "\\s+$",
        ASIAN,
        "[0-9]|\\p{N}",
    ),
    "deepseek-coder": ("[\r\n]", "\\s?\\p{L}+", "\\s?\\p{P}+", ASIAN, "\\p{N}"),
    "kimi-k2": (KIMI,),
    "seed-coder": (
        ENDINGS
        + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "minimax-m2": (_O200K,),
    "exaone-moe": (
        ENDINGS
        + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
        + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4", "lfm2"), (_LIKE_LLAMA,)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_O200K,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
}


def published(pre: str, folder: Path) -> tokenizers.Tokenizer:
    """What the makers of the models publish, with this vocabulary."""
    transformers = pytest.importorskip("transformers")
    values = metadata(pre)
    tokens = values["tokenizer.ggml.tokens"]
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in values["tokenizer.ggml.merges"]]
    if pre in ("gpt-2", "phi-2", "olmo", "exaone4", "mpt"):
        return with_added(transformers.GPT2Tokenizer(vocab=vocab, merges=merges))
    if pre in ("qwen2", "deepseek-r1-qwen", "stablelm2"):
        return with_added(transformers.Qwen2Tokenizer(vocab=vocab, merges=merges))
    if pre == "qwen35":
        return with_added(transformers.Qwen3_5Tokenizer(vocab=vocab, merges=merges))
    if pre in (
        "smollm",
        "refact",
        "starcoder",
        "command-r",
    ):  # transformers has no class for it; this is its tokenizer.json
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        backend.add_special_tokens(SPECIAL)
        backend.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
        return backend
    if pre in EXPRESSIONS:
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
        splits = [
            pre_tokenizers.Split(tokenizers.Regex(expression), "isolated")
            for expression in EXPRESSIONS[pre]
        ]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
        backend.add_special_tokens(SPECIAL)
        backend.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
        return backend
    pytest.importorskip("gguf")
    if pre == "pixtral":
        values["tokenizer.ggml.pre"] = "tekken"
    write_gguf(folder / "model.gguf", values, {})
    loaded = transformers.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
    return loaded.backend_tokenizer


@pytest.mark.parametrize("num", [NUM_TEXTS // 50, *slow([NUM_TEXTS])])
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_texts_have_the_tokens_of_transformers(pre: str, num: int, tmp_path: Path) -> None:
    ours = ids_of(made(metadata(pre)), num)
    theirs = ids_of(published(pre, tmp_path), num)
    for text, own, other in zip(texts()[:num], ours, theirs, strict=True):
        assert own == other, repr(text)


def test_pre_tokenizers_differ() -> None:
    """So that a wrong one would be seen."""
    found = {str(ids_of(made(metadata(pre)))) for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2")}
    assert len(found) == 4


@cache
def pieces() -> dict[str, Any]:
    """A vocabulary of SentencePiece: byte tokens, then pieces with falling scores."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=2_000, show_progress=False)
    backend.train_from_iterator([*topics.topics.values(), *texts()[::3]], trainer)
    model = json.loads(backend.to_str())["model"]
    joined = {"".join(merge): rank for rank, merge in reversed(list(enumerate(model["merges"])))}
    by_rank = [one for one in sorted(joined, key=joined.__getitem__) if one not in ("<s>", "</s>")]
    letters = [token for token in model["vocab"] if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    kinds = [2, CONTROL, CONTROL] + [BYTE] * 256
    tokens += [*by_rank, *letters]
    kinds += [1] * (len(by_rank) + len(letters))
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(by_rank) + len(letters))]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array(scores, dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(kinds, dtype=np.int32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def test_sentencepiece_has_the_tokens_of_transformers() -> None:
    """Of texts that do not begin with a space: SentencePiece puts one before these, too, as its
    tokenizer.json files do, and transformers' class does not."""
    transformers = pytest.importorskip("transformers")
    convert = pytest.importorskip("transformers.convert_slow_tokenizer")
    values = pieces()
    vocab = {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}
    normal = {
        token: score
        for token, score in zip(vocab, values["tokenizer.ggml.scores"].tolist(), strict=True)
        if vocab[token] >= 259
    }
    merges = convert.generate_merges(vocab, normal)
    theirs = transformers.LlamaTokenizer(vocab=vocab, merges=merges, legacy=True)
    own = ids_of(made(values))
    other = ids_of(theirs.backend_tokenizer)
    num_compared = 0
    for text, ours, expected in zip(texts(), own, other, strict=True):
        if not has_leading_space(text):
            assert ours == expected, repr(text)
            num_compared += 1
    assert num_compared > NUM_TEXTS / 2


def has_leading_space(text: str) -> bool:
    """Whether a part between special tokens begins with a space."""
    parts = text.replace("</s>", "<s>").replace("<unk>", "<s>").split("<s>")
    return any(part.startswith((" ", "▁")) for part in parts)


def test_sentencepiece_is_that_of_published_files() -> None:
    """All texts, against the form of Llama 2's tokenizer.json, which transformers reads."""
    values = pieces()
    made_json = tokenizer_files(values, "")["tokenizer.json"]
    model = made_json["model"]
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=model["vocab"],
            merges=[tuple(merge) for merge in model["merges"]],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    ours = made(values)
    assert ids_of(ours) == ids_of(backend)
    plain = [text for text in texts() if "<s>" not in text][:2_000]
    for text in plain:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == backend.decode(ids)


def test_gemma_4_has_the_tokens_of_transformers() -> None:
    """Its files have merges, and a text gets no space before it."""
    transformers = pytest.importorskip("transformers")
    model = tokenizer_files(pieces(), "")["tokenizer.json"]["model"]
    values = {
        **pieces(),
        "tokenizer.ggml.model": "gemma4",
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_space_prefix": False,
    }
    theirs = transformers.GemmaTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<unk>",
        mask_token="<unk>",
    )
    ours = made(values)
    assert ids_of(ours) == ids_of(theirs.backend_tokenizer)
    for text in texts()[:500]:
        ids = ours.encode(text, add_special_tokens=False).ids
        assert ours.decode(ids) == theirs.backend_tokenizer.decode(ids)


def test_decoding_reverses_encoding() -> None:
    backend = made(metadata("llama-bpe"))
    for text in texts()[:2_000]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert backend.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("changes", "first", "last"),
    [
        ({"pre": "llama-bpe", "add_bos_token": None}, True, False),
        ({"pre": "qwen2", "add_bos_token": None}, False, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, False, False),
        ({"pre": "gpt-2", "add_bos_token": True, "add_eos_token": True}, True, True),
    ],
)
def test_texts_begin_and_end_as_the_file_says(changes: Any, first: bool, last: bool) -> None:
    backend = made(metadata(**changes))
    ids = backend.encode("hello").ids
    assert (ids[0] == 0) == first
    assert (ids[-1] == 2) == last


def test_sentencepiece_begins_texts_unless_the_file_denies_it() -> None:
    assert made(pieces()).encode("the").ids[0] == 1
    denied = pieces() | {"tokenizer.ggml.add_bos_token": False}
    assert made(denied).encode("the").ids[0] != 1


def test_named_templates_are_kept() -> None:
    values = metadata("qwen2") | {
        "tokenizer.chat_template": "A",
        "tokenizer.chat_template.tool_use": "B",
    }
    config = tokenizer_files(values, "")["tokenizer_config.json"]
    assert config["chat_template"] == [
        {"name": "default", "template": "A"},
        {"name": "tool_use", "template": "B"},
    ]
    assert config["eos_token"] == "<|im_end|>"


def test_wefts_tokenizer_takes_it(tmp_path: Path) -> None:
    for name, content in tokenizer_files(metadata("qwen2"), "").items():
        (tmp_path / name).write_text(json.dumps(content))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode(tokenizer.encode("naïve 😀")) == "naïve 😀"


BAD = {
    "another kind": (
        {"model": "t5"},
        "'t5', which is not supported; gpt2, llama, gemma4 and bert are",
    ),
    "another pre-tokenizer": (
        {"pre": "default"},
        "'default', which is not supported; .*--tokenizer",
    ),
    "no pre-tokenizer": ({"pre": None}, "'default', which is not supported"),
    "no tokens": ({"tokens": None}, r"has no tokenizer\.ggml\.tokens"),
    "tokens that are a number": ({"tokens": 7}, r"has no tokenizer\.ggml\.tokens"),
    "no merges": ({"merges": None}, r"has no tokenizer\.ggml\.merges"),
    "too few kinds": ({"token_type": np.array([1], dtype=np.int32)}, "one number for each"),
    "kinds that are a text": ({"token_type": "x"}, "one number for each"),
    "an end that is no token": ({"eos_token_id": 10**6}, "but there are"),
    "a beginning that is no number": ({"bos_token_id": "x"}, "but there are"),
}


@pytest.mark.parametrize("what", BAD)
def test_unknown_tokenizer_settings_are_refused_by_name(what: str) -> None:
    changes, message = BAD[what]
    with pytest.raises(TokenizerError, match=message) as raised:
        tokenizer_files(metadata(**{"pre": "qwen2", **changes}), "model.gguf")
    assert str(raised.value).startswith("model.gguf")
    assert "\n" not in str(raised.value)


def test_scores_that_cannot_be_ordered_are_refused() -> None:
    scores = pieces()["tokenizer.ggml.scores"].copy()
    scores[300] = np.nan
    with pytest.raises(TokenizerError, match="not all numbers"):
        tokenizer_files(pieces() | {"tokenizer.ggml.scores": scores}, "")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.ggml\.scores"):
        tokenizer_files(pieces() | {"tokenizer.ggml.scores": None}, "")
