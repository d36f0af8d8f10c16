"""A model's tokenizer: text to ids and back, its special tokens, and the chat template that comes with it.

Reads the files of a Hugging Face model folder with the `tokenizers` library alone. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tokenizers

from weft.messages.sampling import InvalidParam
from weft.text.detokenizer import (
    MAX_LOOK_BACK,
    REPLACEMENT,
    ByteDetokenizer,
    Detokenizer,
    WindowDetokenizer,
    begun_character,
)
from weft.text.infill import NAMES as INFILL_NAMES
from weft.text.infill import find_infill
from weft.text.turns import Workers

INLINE_LEN = 2_048  # characters that are encoded on the event loop: about 0.5 ms; longer texts go to a thread
SLICE_LEN = 131_072  # characters that a thread encodes in one turn, unless a single text is longer: about 50 ms
_MARK = "☺"  # a text that merges with none behind it
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)

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
        infill_names: dict[str, str] | None = None,
    ) -> None:
        """`special_tokens`: "bos_token" -> "<s>"; `chat_templates`: "default" -> Jinja source; `infill_names`:
        "prefix_token" -> "▁<PRE>"."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self.infill = find_infill(backend.token_to_id, infill_names or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self.longest_token = max(map(len, vocab), default=1)  # characters
        self._is_byte_level = _is_byte_level(backend)
        self._pieces = _Pieces(backend, self._is_byte_level, frozenset())
        self._plain_pieces = _Pieces(backend, self._is_byte_level, self.special_ids)
        self._workers = Workers(2, "the tokenizer")

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises `TokenizerError`, which names the file that is to blame."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist: the model folder has no tokenizer that weft can read"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise TokenizerError(f"{path} is no tokenizer: {exc}") from exc
        config = _read_json(folder / "tokenizer_config.json")
        special = {name: _content(config[name]) for name in _SPECIAL_NAMES if config.get(name)}
        infill = {name: _content(config[name]) for name in INFILL_NAMES if config.get(name)}
        return cls(backend, special, _chat_templates(folder, config), infill)

    @property
    def bos_token_id(self) -> int | None:
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._special_id("eos_token")

    @property
    def opening_ids(self) -> list[int]:
        """What the tokenizer puts before a text: the token that begins one, or nothing."""
        ids = self.encode("")
        return ids[:1] if ids and ids[0] == self.bos_token_id else []

    async def encode_within(
        self, texts: Sequence[str], *, context_len: int | None = None
    ) -> list[list[int]]:
        """Ids of texts that go on from others: without special tokens, and without the space that some tokenizers put
        before a text. Errors as of `encode_all`."""
        if self._is_byte_level:
            return await self.encode_async(texts, add_special_tokens=False, context_len=context_len)
        mark = self.encode(_MARK, add_special_tokens=False)
        marked = [_MARK + text for text in texts]
        room = None if context_len is None else context_len + len(mark)
        encoded = await self.encode_async(marked, add_special_tokens=False, context_len=room)
        if any(
            ids[: len(mark)] != mark for ids in encoded
        ):  # it does not stand by itself in this vocabulary
            return await self.encode_async(texts, add_special_tokens=False, context_len=context_len)
        return [ids[len(mark) :] for ids in encoded]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, with the tokenizer's own beginning and end unless told otherwise.

        Special tokens spelled out in the text become those tokens, as everywhere in the field.
        """
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """Ids of each text. Raises `ContextExceeded` for one of more than `context_len` tokens.

        What cannot fit whatever its tokens are is refused before the work is done.
        """
        self._check_lens(texts, context_len)
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as exc:  # lone surrogates
            raise InvalidParam("prompt", "the text is not valid Unicode") from exc
        for encoding in encodings:
            if context_len is not None and len(encoding) > context_len:
                raise ContextExceeded(
                    "prompt",
                    f"the prompt has {len(encoding):,} tokens, more than the context of {context_len:,}",
                )
        return [encoding.ids for encoding in encodings]

    async def encode_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """`encode_all`, in a thread if there is much to do. The library lets go of the interpreter meanwhile.

        Many texts take a turn for every `SLICE_LEN` characters, so that others are served in between, and the first
        that is too long ends it. Raises `Busy`, too.
        """
        self._check_lens(texts, context_len)

        def work(part: Sequence[str]) -> list[list[int]]:
            return self.encode_all(
                part, add_special_tokens=add_special_tokens, context_len=context_len
            )

        if sum(map(len, texts)) <= INLINE_LEN:
            return work(texts)
        found: list[list[int]] = []
        for part, length in _slices(texts, len):
            found += await self._workers.run(partial(work, part), is_long=length > SLICE_LEN)
        return found

    async def encode_inputs(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        max_len: int | None = None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """`encode_input` of each, in a thread if there is much to do, in turns as `encode_async`."""

        def work(part: Sequence[str | tuple[str, str]]) -> list[Encoded]:
            try:
                return self.encode_each(part, max_len, side, add_special_tokens)
            except (TypeError, UnicodeError) as exc:  # lone surrogates
                raise InvalidParam("input", "the text is not valid Unicode") from exc

        if sum(map(_num_chars, inputs)) <= INLINE_LEN:
            return work(inputs)
        found: list[Encoded] = []
        for part, length in _slices(inputs, _num_chars):
            found += await self._workers.run(partial(work, part), is_long=length > SLICE_LEN)
        return found

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
        return [
            self._cut_and_closed([next(found) for _ in one], max_len, side, add_special_tokens)
            for one in lists
        ]

    def _cut_and_closed(
        self,
        parts: list[tokenizers.Encoding],
        max_len: int | None,
        side: str,
        add_special_tokens: bool,
    ) -> Encoded:
        backend = self._backend
        if max_len is not None:
            num_special = (
                backend.num_special_tokens_to_add(len(parts) == 2) if add_special_tokens else 0
            )
            for part, length in zip(
                parts, _cut([len(part) for part in parts], max_len - num_special), strict=True
            ):
                if length < len(part):
                    part.truncate(length, direction=side)
        pair = parts[1] if len(parts) == 2 else None
        whole = backend.post_process(parts[0], pair, add_special_tokens=add_special_tokens)
        return Encoded(whole.ids, whole.type_ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        [text] = await self.decode_all_async([ids], skip_special_tokens=skip_special_tokens)
        return text

    async def decode_all_async(
        self, lists: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str]:
        """The text of each list, in a thread if there is much to do. Raises `Busy`."""

        def work() -> list[str]:
            return self._backend.decode_batch(lists, skip_special_tokens=skip_special_tokens)

        num = sum(map(len, lists)) + len(lists)
        return (
            work() if num <= INLINE_LEN else await self._workers.run(work, is_long=num > SLICE_LEN)
        )

    async def decode_prompt(self, ids: Sequence[int]) -> str:
        """The text that a completion of `ids` goes on from: without the beginning of a character at their end, which
        belongs to the completion (`detokenizer.py`)."""
        tail = list(ids[-MAX_LOOK_BACK:])
        if self._is_byte_level and begun_character(
            self._plain_pieces, tail
        ):  # its token may end the one before
            return (await self.decode_async(ids)).removesuffix(REPLACEMENT)
        num_begun = 0
        while begun_character(self._plain_pieces, tail):
            tail.pop()
            num_begun += 1
        return await self.decode_async(ids[: len(ids) - num_begun])

    def detokenizer(
        self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()
    ) -> Detokenizer:
        """A fresh incremental decoder for one completion of the ids `prompt`."""
        pieces = self._plain_pieces if skip_special_tokens else self._pieces
        if self._is_byte_level:
            return ByteDetokenizer(pieces, prompt)
        return WindowDetokenizer(
            lambda ids: self._backend.decode(ids, skip_special_tokens=False), pieces, prompt
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes that one token stands for, by itself; special tokens as they are spelled."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; U+FFFD for bytes that are no character by themselves."""
        return self._pieces[token].decode("utf-8", "replace")

    def _special_id(self, name: str) -> int | None:
        content = self.special_tokens.get(name)
        return None if content is None else self._backend.token_to_id(content)

    def _check_lens(self, texts: Sequence[str], context_len: int | None) -> None:
        """Refuse what is longer than any tokens of a context can be."""
        if context_len is None:
            return
        longest = max(map(len, texts), default=0)
        if longest > context_len * self.longest_token:
            raise ContextExceeded(
                "prompt",
                f"the prompt has {longest:,} characters; no context of {context_len:,} tokens holds it",
            )


class _Pieces(dict[int, bytes]):
    """The bytes of each token, worked out when first asked for: a vocabulary is large, what is used of it small."""

    def __init__(
        self, backend: tokenizers.Tokenizer, is_byte_level: bool, skipped: frozenset[int]
    ) -> None:
        super().__init__()
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._falls_back = "ByteFallback" in _decoder_types(backend)
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
        if (
            self._falls_back
            and len(spelled) == 6
            and spelled.startswith("<0x")
            and spelled.endswith(">")
        ):
            return bytes([int(spelled[3:5], 16)])
        return spelled.replace("▁", " ").encode()


def _num_chars(one: str | tuple[str, str]) -> int:
    return len(one) if isinstance(one, str) else len(one[0]) + len(one[1])


def _slices(items: Sequence[T], num_chars: Callable[[T], int]) -> Iterator[tuple[Sequence[T], int]]:
    """`items` in parts of at most `SLICE_LEN` characters, or of one item, each with its characters."""
    begin, length = 0, 0
    for place, item in enumerate(items):
        own = num_chars(item)
        if length + own > SLICE_LEN and place > begin:
            yield items[begin:place], length
            begin, length = place, 0
        length += own
    if begin < len(items):
        yield items[begin:], length


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
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    return alphabet | {chr(256 + position): byte for position, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder only maps the characters of tokens to bytes."""
    return _decoder_types(backend) == ["ByteLevel"]


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """What its decoder does with the spellings of tokens, one after the other."""
    if backend.decoder is None:
        return []
    decoder = msgspec.json.decode(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder.get("type") == "Sequence" else [decoder]
    return [str(step.get("type")) for step in steps]


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
    further = {
        path.stem: _read_template(path)
        for path in sorted(folder.glob("additional_chat_templates/*.jinja"))
    }
    if jinja.is_file():
        return further | {"default": _read_template(jinja)}
    template = _read_json(folder / "chat_template.json").get("chat_template") or config.get(
        "chat_template"
    )
    if template is None:
        return further
    if isinstance(template, str):
        return further | {"default": template}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in template} | further
    except (KeyError, TypeError) as exc:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template has no known form"
        ) from exc


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as exc:
        raise TokenizerError(f"{path} is not UTF-8: {exc}") from exc
