"""A model's tokenizer: text to ids and back, its special tokens, and the chat template that comes with it.

Reads the files of a Hugging Face model folder with the `tokenizers` library alone. Knows nothing of requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tokenizers

from weft.messages.sampling import InvalidParam
from weft.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer

INLINE_LEN = 2_048  # characters that are encoded on the event loop: about 0.5 ms; longer texts go to a thread
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")

T = TypeVar("T")


class TokenizerError(Exception):
    """The tokenizer files of the model are missing or broken. The message is for the user."""


class ContextExceeded(InvalidParam):
    """Prompt and completion do not fit the context."""


class Encoded(NamedTuple):
    """The tokens of a text or of a pair of texts, and of which of the two each is (0, 1), if that was told."""

    ids: list[int]
    types: list[int]


class Tokenizer:
    """A tokenizer with its special tokens and, if the model has one, its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
    ) -> None:
        """`special_tokens`: "bos_token" -> "<s>"; `chat_templates`: "default" -> Jinja source."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self.longest_token = max(map(len, vocab), default=1)  # characters
        self._is_byte_level = _is_byte_level(backend)
        self._pieces = _Pieces(backend, self._is_byte_level, frozenset())
        self._plain_pieces = _Pieces(backend, self._is_byte_level, self.special_ids)
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenizer")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises `TokenizerError`, which names the file that is to blame."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist: the model folder has no tokenizer that weft can read")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise TokenizerError(f"{path} is no tokenizer: {exc}") from exc
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        return cls(backend, special, _chat_templates(folder, config))

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the tokenizer's own beginning and end unless told otherwise.

        Special tokens spelled out in the text become those tokens, as everywhere in the field.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, context_len: int | None = None
    ) -> list[list[int]]:
        """Ids of each text. Raises `ContextExceeded` for one of more than `context_len` tokens.

        What cannot fit whatever its tokens are is refused before the work is done.
        """
        for text in texts:
            if context_len is not None and len(text) > context_len * self.longest_token:
                raise ContextExceeded(
                    "prompt", f"the prompt has {len(text):,} characters; no context of {context_len:,} tokens holds it"
                )
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeError) as exc:  # lone surrogates
            raise InvalidParam("prompt", "the text is not valid Unicode") from exc
        for encoding in encodings:
            if context_len is not None and len(encoding) > context_len:
                raise ContextExceeded(
                    "prompt", f"the prompt has {len(encoding):,} tokens, more than the context of {context_len:,}"
                )
        return [encoding.ids for encoding in encodings]

    async def encode_async(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, context_len: int | None = None
    ) -> list[list[int]]:
        """`encode_all`, in a thread if there is much to do. The library lets go of the interpreter meanwhile."""

        def work() -> list[list[int]]:
            return self.encode_all(texts, add_special_tokens=add_special_tokens, context_len=context_len)

        return work() if sum(map(len, texts)) <= INLINE_LEN else await self._in_thread(work)

    async def encode_inputs(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        max_len: int | None = None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """`encode_input` of each, in a thread if there is much to do."""

        def work() -> list[Encoded]:
            try:
                return self.encode_each(inputs, max_len, side, add_special_tokens)
            except (TypeError, UnicodeError) as exc:  # lone surrogates
                raise InvalidParam("input", "the text is not valid Unicode") from exc

        num_chars = sum(len(one) if isinstance(one, str) else len(one[0]) + len(one[1]) for one in inputs)
        return work() if num_chars <= INLINE_LEN else await self._in_thread(work)

    def encode_input(self, one: str | tuple[str, str], max_len: int | None = None) -> Encoded:
        """The tokens of a text or of a pair of texts, cut to `max_len`, as `encode_each` does it."""
        return self.encode_each([one], max_len)[0]

    def encode_each(
        self,
        inputs: Sequence[str | tuple[str, str]],
        max_len: int | None = None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """The tokens of each text or pair of texts, cut to `max_len` at its left or right `side`, special tokens left
        in their places. Of a pair the longer text is cut. All are encoded in one call, in the library's threads.
        """
        lists = [(one,) if isinstance(one, str) else one for one in inputs]
        texts = [text for one in lists for text in one]
        found = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False))
        return [self._cut_and_closed([next(found) for _ in one], max_len, side, add_special_tokens) for one in lists]

    def _cut_and_closed(
        self, parts: list[tokenizers.Encoding], max_len: int | None, side: str, add_special_tokens: bool
    ) -> Encoded:
        backend = self._backend
        if max_len is not None:
            num_special = backend.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
            for part, length in zip(parts, _cut([len(part) for part in parts], max_len - num_special), strict=True):
                if length < len(part):
                    part.truncate(length, direction=side)
        pair = parts[1] if len(parts) == 2 else None
        whole = backend.post_process(parts[0], pair, add_special_tokens=add_special_tokens)
        return Encoded(whole.ids, whole.type_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(ids) <= INLINE_LEN:
            return self.decode(ids, skip_special_tokens=skip_special_tokens)
        return await self._in_thread(lambda: self.decode(ids, skip_special_tokens=skip_special_tokens))

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A fresh incremental decoder for one completion."""
        if self._is_byte_level:
            return ByteDetokenizer(self._plain_pieces if skip_special_tokens else self._pieces)
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return WindowDetokenizer(lambda ids: self._backend.decode(ids, skip_special_tokens=False), skipped)

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, by itself; special tokens as they are spelled."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; U+FFFD for bytes that are no character by themselves."""
        return self._pieces[token].decode("utf-8", "replace")

    def _special_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)


class _Pieces(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for: a vocabulary is large, what is used of it small."""

    def __init__(self, backend: tokenizers.Tokenizer, is_byte_level: bool, skipped: frozenset[int]) -> None:
        super().__init__()
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._skipped = skipped

    def __missing__(self, token: int) -> bytes:
        piece = b"" if token in self._skipped else self._bytes_of(token)
        self[token] = piece
        return piece

    def _bytes_of(self, token: int) -> bytes:
        spelled = self._backend.id_to_token(token)
        if spelled is None:  # the model's vocabulary may be padded beyond the tokenizer's
            return b""
        if self._is_byte_level:
            try:
                return bytes(_BYTE_OF[char] for char in spelled)
            except KeyError:  # an added token, spelled as it is
                return spelled.encode()
        if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("▁", " ").encode()


def _cut(lens: Sequence[int], room: int) -> list[int]:
    """Lengths that fit into `room` together: the longest gives way first."""
    room = max(room, 0)
    if sum(lens) <= room or len(lens) == 1:
        return [min(length, room) for length in lens]
    first, second = lens
    half = room // 2
    if second <= half:
        return [room - second, second]
    return [min(first, room - half), room - min(first, room - half)]


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in byte-level BPE, reversed.

    Source: GPT-2, `bytes_to_unicode` in github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder only maps the characters of tokens to bytes."""
    if backend.decoder is None:
        return False
    decoder = msgspec.json.decode(backend.decoder.__getstate__())
    if decoder.get("type") == "Sequence" and len(decoder["decoders"]) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise TokenizerError(f"{path} is not the JSON object it should be: {exc}") from exc


def _content(token: Any) -> str:
    """A special token is written as a string or as an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise TokenizerError(f"tokenizer_config.json: {token!r} is no special token")
    return content


def _chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Named templates, from where models of different ages keep them; the newest place wins."""
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        try:
            return {"default": jinja.read_text("utf-8")}
        except UnicodeDecodeError as exc:
            raise TokenizerError(f"{jinja} is not UTF-8: {exc}") from exc
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if template is None:
        return {}
    if isinstance(template, str):
        return {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template}
    except (KeyError, TypeError) as exc:
        raise TokenizerError(f"{folder / 'tokenizer_config.json'}: chat_template has no known form") from exc
