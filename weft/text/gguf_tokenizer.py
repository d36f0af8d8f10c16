"""The tokenizer of a GGUF file, from its metadata, in the form of Hugging Face's `tokenizer.json`.

A file contains a vocabulary, merges or scores, and the *name* of the expression that splits a text
into words before tokens are merged. Names whose expression is not known exactly are refused, with
the name in the error: a nearly correct expression would make answers a little worse without any
error. Knows no model and no file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from weft.json_types import JsonMapping, JsonObject
from weft.text.tokenizer import TokenizerError

HINT = "give the tokenizer of the original model with --tokenizer, a folder or hub id"

# Expressions that split a text into words. Sources: the tokenizer.json files of Llama 3, Qwen2 and
# Mistral Nemo; GPT-2's expression is that of `ByteLevel` in the library.
_LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2 = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
# Combining marks belong to the word before them.
_QWEN_3_5 = _QWEN_2.replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(
    r"[^\s\p{L}\p{N}]+", r"[^\s\p{L}\p{M}\p{N}]+"
)
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SHORTENED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_SHORTENED}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SIGNS = r"!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~"
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    rf"[{_SIGNS}][A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# DeepSeek's first models, and V2: letters that have an upper and a lower case, by the Unicode of
# their time.
_CASED = (
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
_OF_THE_EAST = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_CASED}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _OF_THE_EAST,
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _OF_THE_EAST)
# Han characters are words of their own.
_CASE = (rf"{_UPPER[:-1]}&&[^\p{{Han}}]]", rf"{_LOWER[:-1]}&&[^\p{{Han}}]]")
_KIMI = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASE[0]}*{_CASE[1]}+{_SHORTENED}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASE[0]}+{_CASE[1]}*{_SHORTENED}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SEED = _QWEN_2.replace(r"[^\s\p{L}\p{N}]+[\r\n]*", r"[^\s\p{L}\p{N}\r\n]+")
# Words may have single spaces in them.
_EXAONE_MOE = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
_GPT_2 = _BYTE_LEVEL | {"use_regex": True}
_DIGITS = {"type": "Digits", "individual_digits": True}


def _split(*expressions: str, has_digits: bool = False) -> list[JsonObject]:
    """Split by each expression: each one splits the pieces of the previous one.
    `has_digits`: then into single digits."""
    splitters = [
        {
            "type": "Split",
            "pattern": {"Regex": expression},
            "behavior": "Isolated",
            "invert": False,
        }
        for expression in expressions
    ]
    digits = [_DIGITS] if has_digits else []
    return [*splitters, *digits, _BYTE_LEVEL]


# By the name in `tokenizer.ggml.pre`.
PRE_TOKENIZERS: dict[str, list[JsonObject]] = {
    "gpt-2": [_GPT_2],
    "phi-2": [_GPT_2],
    "olmo": [_GPT_2],
    "exaone4": [_GPT_2],
    "smollm": [_DIGITS, _GPT_2],
    "refact": [_DIGITS, _GPT_2],  # Granite
    "starcoder": [_DIGITS, _GPT_2],
    "command-r": [_DIGITS, _GPT_2],
    "llama-bpe": _split(_LLAMA_3),
    "llama3": _split(_LLAMA_3),
    "llama-v3": _split(_LLAMA_3),
    "qwen2": _split(_QWEN_2),
    "deepseek-r1-qwen": _split(_QWEN_2),
    "qwen35": _split(_QWEN_3_5),
    "lfm2": _split(_LLAMA_3),
    "tekken": _split(_TEKKEN),
    "dbrx": _split(_LLAMA_3),  # Phi-4, OLMo 2
    "smaug-bpe": _split(_LLAMA_3),
    "chatglm-bpe": _split(_LLAMA_3),
    "glm4": _split(_LLAMA_3),
    "gpt-4o": _split(_GPT_4O),  # gpt-oss, Phi-4-mini
    "llama4": _split(_GPT_4O),
    "deepseek-v3": _split(*_DEEPSEEK_3),
    "hunyuan-dense": _split(*_DEEPSEEK_3),
    "deepseek-llm": _split(*_DEEPSEEK_LLM, has_digits=True),  # DeepSeek V2, too
    "deepseek-coder": _split(*_DEEPSEEK_CODER, has_digits=True),
    "kimi-k2": _split(_KIMI),
    "seed-coder": _split(_SEED),  # Seed-OSS
    "minimax-m2": _split(_GPT_4O),
    "exaone-moe": _split(_EXAONE_MOE),
    "pixtral": _split(_TEKKEN),
    "stablelm2": _split(_QWEN_2),
    "mpt": [_GPT_2],  # GPT-NeoX
}
# A word that is in the vocabulary becomes its token without merges (`ignore_merges`).
_UNSPLIT_WORDS = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral")
_COMPOSED = (
    "qwen2",
    "deepseek-r1-qwen",
    "qwen35",
    "stablelm2",
)  # texts are normalized to Unicode NFC
# A text begins with the BOS token, unless the file says no.
_BEGINS = ("llama-bpe", "llama3", "llama-v3", "tekken", "pixtral")

# Values of `tokenizer.ggml.token_type`.
_TEXT = 1
_CONTROL = 3
_USER_DEFINED = 4
_SPECIAL_KEYS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "cls_token": "cls_token_id",
    "sep_token": "seperator_token_id",  # as the format spells it
    "mask_token": "mask_token_id",
}
_SPACE = "▁"
_MAX_PIECE_LEN = 128  # characters of a SentencePiece token; the library's default limit is 16


def tokenizer_files(metadata: JsonMapping, label: str) -> dict[str, JsonObject]:
    """The content of `tokenizer.json` and `tokenizer_config.json`. Raises TokenizerError, whose
    message begins with `label`."""
    vocabulary = _Vocabulary(metadata, label)
    kind = metadata.get("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif kind == "llama":
        has_prefix = vocabulary.flag("add_space_prefix", True)
        tokenizer = _sentencepiece(vocabulary, _merges(vocabulary), has_prefix=has_prefix)
    elif kind == "gemma4":
        # Its files have the merges.
        tokenizer = _sentencepiece(vocabulary, vocabulary.merges(), has_prefix=False)
    elif kind == "bert":
        tokenizer = _wordpiece(vocabulary)
    else:
        raise TokenizerError(
            f"{label}: its tokenizer is {str(kind)[:64]!r}, which is not supported; gpt2, llama, "
            f"gemma4 and bert are; {HINT}"
        )
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config(metadata, label)}


def tokenizer_config(metadata: JsonMapping, label: str) -> JsonObject:
    """Special tokens and chat templates. Raises TokenizerError."""
    vocabulary = _Vocabulary(metadata, label)
    found: JsonObject = {}
    for name, key in _SPECIAL_KEYS.items():
        token = vocabulary.special(key)
        if token is not None:
            found[name] = token
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        found["chat_template"] = template
    prefix = "tokenizer.chat_template."
    named = [
        {"name": key.removeprefix(prefix), "template": value}
        for key, value in metadata.items()
        if key.startswith(prefix) and isinstance(value, str)
    ]
    if named and isinstance(template, str):
        found["chat_template"] = [{"name": "default", "template": template}, *named]
    return found


class _Vocabulary:
    """The tokens of a file."""

    def __init__(self, metadata: JsonMapping, label: str) -> None:
        """Raises TokenizerError if there are no tokens, or not one type for each token."""
        self.label = label
        self.metadata = metadata
        self.tokens = self.strings("tokens")
        self.ids: dict[str, int] = {}
        for index, token in enumerate(self.tokens):
            self.ids.setdefault(token, index)
        self.kinds = self._numbers("token_type", [1] * len(self.tokens))

    def special(self, key: str) -> str | None:
        """The token whose id a key has; None if the file does not have the key."""
        index = self.metadata.get(f"tokenizer.ggml.{key}")
        if index is None:
            return None
        if type(index) is not int or not 0 <= index < len(self.tokens):
            raise TokenizerError(
                f"{self.label}: tokenizer.ggml.{key} is {str(index)[:64]}, "
                f"but there are {len(self.tokens):,} tokens"
            )
        return self.tokens[index]

    def strings(self, key: str) -> list[str]:
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if values is None or isinstance(values, str) or not isinstance(values, Iterable):
            raise TokenizerError(f"{self.label} has no tokenizer.ggml.{key}; {HINT}")
        found = list(values)
        if not all(isinstance(value, str) for value in found):
            raise TokenizerError(f"{self.label}: tokenizer.ggml.{key} are not texts")
        return found

    def merges(self) -> list[list[str]]:
        """The pairs of tokens that are merged, the first pair first."""
        found = []
        for merge in self.strings("merges"):
            left, _, right = merge.partition(" ")
            found.append([left, right])
        return found

    def scores(self) -> Sequence[float]:
        scores = self._numbers("scores", [])
        # Sorting by NaN would give no order.
        if any(score != score for score in scores):
            raise TokenizerError(f"{self.label}: tokenizer.ggml.scores are not all numbers")
        return scores

    def flag(self, key: str, default: bool) -> bool:
        return bool(self.metadata.get(f"tokenizer.ggml.{key}", default))

    def added(self) -> list[JsonObject]:
        """Tokens that are matched in a text before it is split."""
        found = []
        for index, (token, kind) in enumerate(zip(self.tokens, self.kinds, strict=True)):
            if kind in (_CONTROL, _USER_DEFINED) and token and self.ids[token] == index:
                found.append(_added_token(index, token, is_special=kind == _CONTROL))
        return found

    def closing(self, *, begins: bool) -> JsonObject | None:
        """The post-processor that adds BOS and EOS tokens to a text; None if it would add none.

        `begins`: whether a text gets a BOS token if the file does not say it.
        """
        first = None
        if self.flag("add_bos_token", begins):
            first = self.special("bos_token_id")
        last = None
        if self.flag("add_eos_token", False):
            last = self.special("eos_token_id")
        if first is None and last is None:
            return None
        single = [*_marker(first), {"Sequence": {"id": "A", "type_id": 0}}, *_marker(last)]
        second = [*_marker(first), {"Sequence": {"id": "B", "type_id": 0}}, *_marker(last)]
        special = {}
        for token in (first, last):
            if token is not None:
                special[token] = {"id": token, "ids": [self.ids[token]], "tokens": [token]}
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [*single, *second],
            "special_tokens": special,
        }

    def _numbers(self, key: str, default: list[Any]) -> list[Any]:
        """The numbers of a key, one for each token; `default` if the file does not have the key."""
        values = self.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            return default
        found = values.tolist() if hasattr(values, "tolist") else []
        if not isinstance(found, list) or len(found) != len(self.tokens):
            raise TokenizerError(
                f"{self.label}: tokenizer.ggml.{key} does not have one number for each of the "
                f"{len(self.tokens):,} tokens"
            )
        return found


def _added_token(index: int, token: str, *, is_special: bool) -> JsonObject:
    return {
        "id": index,
        "content": token,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": is_special,
    }


def _byte_level(vocabulary: _Vocabulary) -> JsonObject:
    """Byte-level BPE with the merges of the file."""
    pre = str(vocabulary.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"{vocabulary.label}: its pre-tokenizer is {pre[:64]!r}, which is not supported; "
            f"supported are {', '.join(PRE_TOKENIZERS)}; {HINT}"
        )
    steps = PRE_TOKENIZERS[pre]
    pre_tokenizer = steps[0]
    if len(steps) > 1:
        pre_tokenizer = {"type": "Sequence", "pretokenizers": steps}
    return _tokenizer(
        vocabulary,
        normalizer={"type": "NFC"} if pre in _COMPOSED else None,
        pre_tokenizer=pre_tokenizer,
        closing=vocabulary.closing(begins=pre in _BEGINS),
        decoder=_GPT_2,
        model={"merges": vocabulary.merges(), "ignore_merges": pre in _UNSPLIT_WORDS},
    )


def _sentencepiece(
    vocabulary: _Vocabulary, merges: list[list[str]], *, has_prefix: bool
) -> JsonObject:
    """BPE of characters as SentencePiece has it: spaces are characters of tokens, and unknown
    characters become bytes. `has_prefix`: a text gets a space before it."""
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    normalizer: JsonObject = replaced
    decoders: list[JsonObject] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if has_prefix:
        before = {"type": "Prepend", "prepend": _SPACE}
        normalizer = {"type": "Sequence", "normalizers": [before, replaced]}
        decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    model = {
        "merges": merges,
        "ignore_merges": False,
        "fuse_unk": True,
        "byte_fallback": True,
        "unk_token": vocabulary.special("unknown_token_id"),
    }
    return _tokenizer(
        vocabulary,
        normalizer=normalizer,
        pre_tokenizer=None,
        closing=vocabulary.closing(begins=True),
        decoder={"type": "Sequence", "decoders": decoders},
        model=model,
    )


def _wordpiece(vocabulary: _Vocabulary) -> JsonObject:
    """BERT's: words are cut into the longest tokens. In a file, tokens that begin a word have a
    space before them, and those inside of words have no mark."""
    ids: dict[str, int] = {}
    added = []
    has_upper = False
    for index, token in enumerate(vocabulary.tokens):
        kind = vocabulary.kinds[index]
        text = f"##{token}"
        if token.startswith(_SPACE) and len(token) > 1:
            text = token.removeprefix(_SPACE)
            has_upper = has_upper or text != text.lower()
        elif kind == _CONTROL or (token.startswith("[") and token.endswith("]")):
            text = token
            if kind == _CONTROL:
                added.append(_added_token(index, token, is_special=True))
        ids.setdefault(text, index)
    first = vocabulary.special("cls_token_id") or vocabulary.special("bos_token_id")
    last = vocabulary.special("seperator_token_id") or vocabulary.special("eos_token_id")
    unknown = vocabulary.special("unknown_token_id")
    if first is None or last is None or unknown is None:
        raise TokenizerError(
            f"{vocabulary.label} lacks the token before a text, after it, or for unknown words; "
            f"{HINT}"
        )
    found = _tokenizer(
        vocabulary,
        # A vocabulary without upper case is that of texts in lower case.
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": not has_upper,
        },
        pre_tokenizer={"type": "BertPreTokenizer"},
        closing=_pair_closing(ids, first, last),
        decoder={"type": "WordPiece", "prefix": "##", "cleanup": True},
        model={},
    )
    found["added_tokens"] = added
    found["model"] = {
        "type": "WordPiece",
        "unk_token": unknown,
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": ids,
    }
    return found


def _pair_closing(ids: dict[str, int], first: str, last: str) -> JsonObject:
    """The post-processor of BERT: a pair of texts has its second part in another segment."""

    def marker(token: str, segment: int) -> JsonObject:
        return {"SpecialToken": {"id": token, "type_id": segment}}

    single = [marker(first, 0), {"Sequence": {"id": "A", "type_id": 0}}, marker(last, 0)]
    second = [{"Sequence": {"id": "B", "type_id": 1}}, marker(last, 1)]
    special = {
        token: {"id": token, "ids": [ids[token]], "tokens": [token]} for token in (first, last)
    }
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, *second],
        "special_tokens": special,
    }


def _merges(vocabulary: _Vocabulary) -> list[list[str]]:
    """All pairs of tokens that merge into a token, the highest score first. SentencePiece merges
    the neighbours whose merged token has the highest score, which is the same."""
    scores = vocabulary.scores()
    if not scores:
        raise TokenizerError(f"{vocabulary.label} has no tokenizer.ggml.scores; {HINT}")
    # Only text tokens are merged.
    ids = {
        token: index for token, index in vocabulary.ids.items() if vocabulary.kinds[index] == _TEXT
    }
    found: list[tuple[float, int, int, int, str, str]] = []
    for token, index in ids.items():
        if len(token) > _MAX_PIECE_LEN:
            raise TokenizerError(f"{vocabulary.label} has a token of {len(token):,} characters")
        for middle in range(1, len(token)):
            left = token[:middle]
            right = token[middle:]
            if left in ids and right in ids:
                # If several pairs make the same token, SentencePiece takes the leftmost in the
                # text: of overlapping pairs, that is the pair whose left token is longer.
                found.append((-scores[index], -middle, -len(right), index, left, right))
    found.sort()
    return [[left, right] for *_, left, right in found]


def _tokenizer(
    vocabulary: _Vocabulary,
    *,
    normalizer: JsonObject | None,
    pre_tokenizer: JsonObject | None,
    closing: JsonObject | None,
    decoder: JsonObject,
    model: JsonObject,
) -> JsonObject:
    usual = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "vocab": vocabulary.ids,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added(),
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": closing,
        "decoder": decoder,
        "model": usual | model,
    }


def _marker(token: str | None) -> list[JsonObject]:
    if token is None:
        return []
    return [{"SpecialToken": {"id": token, "type_id": 0}}]
