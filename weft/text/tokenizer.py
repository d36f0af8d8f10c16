"""A model's tokenizer: text to ids and back, special tokens, and the sources of chat templates.

It reads the files of a Hugging Face model folder with only the `tokenizers` library. Knows no
requests.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tokenizers

from weft.json_types import JsonObject
from weft.messages.sampling import InvalidParam
from weft.observe.request_context import spent
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

# Most characters that the event loop encodes: about 0.5 ms; a thread encodes longer texts.
INLINE_LEN = 2_048
# Most characters that a thread encodes in one turn, unless one text is longer: about 50 ms.
SLICE_LEN = 131_072
_BYTE_TOKEN = re.compile(r"<0x(..)>", re.DOTALL)
_MARK = "☺"  # a text whose tokens do not merge with the text after it
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
    """The tokens of a text or of a pair of texts."""

    ids: list[int]
    types: list[int]  # for each token, its text of a pair (0 or 1), if the model distinguishes them


class Tokenizer:
    """A tokenizer with its special tokens and, if the model has one, its chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        infill_names: dict[str, str] | None = None,
    ) -> None:
        """`special_tokens`: "bos_token" -> "<s>"; `chat_templates`: "default" -> Jinja source;
        `infill_names`: "prefix_token" -> "▁<PRE>"."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = special_tokens or {}
        self.chat_templates = chat_templates or {}
        self.infill = find_infill(backend.token_to_id, infill_names or {})
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(id for id in added if added[id].special)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = 1 + max(vocab.values(), default=-1)
        self.longest_token = max(map(len, vocab), default=1)  # characters
        self._is_byte_level = _is_byte_level(backend)
        self._pieces = _Pieces(backend, self._is_byte_level, frozenset())
        self._plain_pieces = _Pieces(backend, self._is_byte_level, self.special_ids)
        self._alone: dict[int, str] = {}  # texts of single tokens, where tokens are no bytes
        self.workers = Workers(2, "the tokenizer")  # they encode beside the event loop

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """The tokenizer of a model folder. Raises `TokenizerError`, which names the faulty file."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(
                f"{path} does not exist: the model folder has no tokenizer that weft can read"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise TokenizerError(f"{path} is not a tokenizer: {exc}") from exc
        config = _read_json(folder / "tokenizer_config.json")
        return cls(
            backend,
            special_tokens=_named_tokens(config, _SPECIAL_NAMES),
            chat_templates=_chat_templates(folder, config),
            infill_names=_named_tokens(config, INFILL_NAMES),
        )

    @property
    def digest(self) -> str:
        """A name for the meaning of its ids: equal for equal tokenizers. It takes a moment."""
        return hashlib.sha256(self._backend.to_str().encode()).hexdigest()

    @property
    def bos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("bos_token", ""))

    @property
    def eos_token_id(self) -> int | None:
        return self.token_id(self.special_tokens.get("eos_token", ""))

    @property
    def opening_ids(self) -> list[int]:
        """The ids that the tokenizer puts before a text: the BOS token, or none."""
        ids = self.encode("")
        if ids and ids[0] == self.bos_token_id:
            return ids[:1]
        return []

    # ---- texts to ids

    async def encode_within(
        self,
        texts: Sequence[str],
        *,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """Ids of texts that continue other texts. Raises like `encode_all`.

        The ids contain no added special tokens, and not the space that some tokenizers put before a
        text.
        """
        if not self._is_byte_level:
            after_mark = await self._encode_after_mark(texts, context_len)
            if after_mark is not None:
                return after_mark
        return await self.encode_async(texts, add_special_tokens=False, context_len=context_len)

    async def _encode_after_mark(
        self,
        texts: Sequence[str],
        context_len: int | None,
    ) -> list[list[int]] | None:
        """Ids of texts encoded after a mark, without the mark; None if it merges with a text."""
        mark = self.encode(_MARK, add_special_tokens=False)
        # The limit applies to the texts without the mark.
        if context_len is not None:
            context_len += len(mark)
        marked = [_MARK + text for text in texts]
        encoded = await self.encode_async(marked, add_special_tokens=False, context_len=context_len)
        after: list[list[int]] = []
        for ids in encoded:
            if ids[: len(mark)] != mark:
                return None
            after.append(ids[len(mark) :])
        return after

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`, by default with the BOS and EOS tokens that the tokenizer adds.

        Spellings of special tokens in the text become these tokens, as in other engines.
        """
        [ids] = self.encode_all([text], add_special_tokens=add_special_tokens)
        return ids

    def encode_all(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """Ids of each text. Raises `ContextExceeded` for a text of more than `context_len` tokens.

        A text that is too long for any tokens to fit is refused before it is encoded.
        """
        if context_len is not None:
            self._check_lens(texts, context_len)
        try:
            encodings = self._backend.encode_batch_fast(
                list(texts),
                add_special_tokens=add_special_tokens,
            )
        except (TypeError, UnicodeError) as exc:  # lone surrogates
            raise InvalidParam("prompt", "the text is not valid Unicode") from exc
        found: list[list[int]] = []
        for encoding in encodings:
            num_tokens = len(encoding)
            if context_len is not None and num_tokens > context_len:
                raise ContextExceeded(
                    "prompt",
                    f"the prompt has {num_tokens:,} tokens, "
                    f"more than the context of {context_len:,}",
                )
            found.append(encoding.ids)
        return found

    async def encode_async(
        self,
        texts: Sequence[str],
        *,
        add_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """`encode_all`, in a thread if the texts are long. The library releases the GIL.

        Many texts take one turn per `SLICE_LEN` characters, so that other requests are served in
        between. The first text that is too long ends the call. Also raises `Busy`.
        """
        work = partial(
            self.encode_all,
            add_special_tokens=add_special_tokens,
            context_len=context_len,
        )
        began_s = time.perf_counter()
        if sum(map(len, texts)) <= INLINE_LEN:
            found = work(texts)
        else:
            if context_len is not None:
                self._check_lens(texts, context_len)  # before waiting for a thread
            found = []
            for part, length in _slices(texts, len):
                found += await self.workers.run(partial(work, part), is_long=length > SLICE_LEN)
        spent("tokenize", began_s)
        return found

    async def encode_prompts(
        self,
        prompts: Sequence[str | list[int]],
        *,
        add_special_tokens: bool = True,
        context_len: int | None = None,
    ) -> list[list[int]]:
        """`encode_async` for prompts, some of which are already ids."""
        found: list[list[int]] = []
        texts: list[str] = []
        indices: list[int] = []  # of the texts
        for index, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                indices.append(index)
                texts.append(prompt)
                found.append([])
            else:
                found.append(prompt)
        if texts:
            encoded = await self.encode_async(
                texts, add_special_tokens=add_special_tokens, context_len=context_len
            )
            for index, ids in zip(indices, encoded, strict=True):
                found[index] = ids
        return found

    async def encode_inputs(
        self,
        inputs: Sequence[str | tuple[str, str]],
        *,
        max_len: int | None = None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """`encode_each` of the inputs, in a thread if they are long, like `encode_async`."""

        def work(part: Sequence[str | tuple[str, str]]) -> list[Encoded]:
            return self.encode_each(part, max_len, side, add_special_tokens)

        # A thread costs more than a short text.
        if sum(map(_num_chars, inputs)) <= INLINE_LEN:
            return work(inputs)
        found: list[Encoded] = []
        for part, length in _slices(inputs, _num_chars):
            found += await self.workers.run(partial(work, part), is_long=length > SLICE_LEN)
        return found

    def encode_input(self, one: str | tuple[str, str], max_len: int | None = None) -> Encoded:
        """The tokens of a text or of a pair of texts, cut to `max_len` as in `encode_each`."""
        [encoded] = self.encode_each([one], max_len)
        return encoded

    def encode_each(
        self,
        inputs: Sequence[str | tuple[str, str]],
        max_len: int | None = None,
        side: str = "right",
        add_special_tokens: bool = True,
    ) -> list[Encoded]:
        """The tokens of each text or pair of texts, cut to `max_len` at its left or right `side`.

        Special tokens are not cut; of a pair, the longer text is cut. One call encodes all texts,
        in the threads of the library. Raises InvalidParam.
        """
        texts: list[str] = []
        for one in inputs:
            texts += [one] if isinstance(one, str) else one
        try:
            encodings = iter(self._backend.encode_batch_fast(texts, add_special_tokens=False))
        except (TypeError, UnicodeError) as exc:  # lone surrogates
            raise InvalidParam("input", "the text is not valid Unicode") from exc
        found: list[Encoded] = []
        for one in inputs:
            parts = [next(encodings)]
            if not isinstance(one, str):
                parts.append(next(encodings))
            found.append(self._cut_and_closed(parts, max_len, side, add_special_tokens))
        return found

    def _cut_and_closed(
        self,
        parts: list[tokenizers.Encoding],
        max_len: int | None,
        side: str,
        add_special_tokens: bool,
    ) -> Encoded:
        """Cut the parts to fit, and add the special tokens."""
        backend = self._backend
        if max_len is not None:
            room = max_len
            if add_special_tokens:
                room -= backend.num_special_tokens_to_add(len(parts) == 2)
            lens = _fitting_lens([len(part) for part in parts], room)
            for part, length in zip(parts, lens, strict=True):
                if length < len(part):
                    part.truncate(length, direction=side)
        first, *rest = parts
        pair = rest[0] if rest else None
        closed = backend.post_process(first, pair, add_special_tokens=add_special_tokens)
        return Encoded(closed.ids, closed.type_ids)

    # ---- ids to texts

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    async def decode_async(self, ids: Sequence[int]) -> str:
        [text] = await self.decode_all_async([ids])
        return text

    async def decode_all_async(
        self,
        lists: Sequence[Sequence[int]],
        *,
        skip_special_tokens: bool = True,
    ) -> list[str]:
        """The text of each list, in a thread if there are many ids. Raises `Busy`."""

        def work() -> list[str]:
            return self._backend.decode_batch(lists, skip_special_tokens=skip_special_tokens)

        num = sum(map(len, lists)) + len(lists)
        if num <= INLINE_LEN:
            return work()
        return await self.workers.run(work, is_long=num > SLICE_LEN)

    async def decode_prompt(self, ids: Sequence[int]) -> str:
        """The text of a prompt, without a partial character at its end.

        The partial character belongs to the completion (`detokenizer.py`).
        """
        tail = list(ids[-MAX_LOOK_BACK:])
        if self._is_byte_level and begun_character(self._plain_pieces, tail):
            # Its token may also end the previous character, so all ids must be decoded.
            text = await self.decode_async(ids)
            return text.removesuffix(REPLACEMENT)
        num_begun = 0
        while begun_character(self._plain_pieces, tail):
            tail.pop()
            num_begun += 1
        return await self.decode_async(ids[: len(ids) - num_begun])

    def detokenizer(
        self,
        *,
        skip_special_tokens: bool = True,
        prompt: Sequence[int] = (),
    ) -> Detokenizer:
        """A new incremental decoder for one completion of the ids `prompt`."""
        pieces = self._plain_pieces if skip_special_tokens else self._pieces
        if self._is_byte_level:
            return ByteDetokenizer(pieces, prompt)
        decode = partial(self._backend.decode, skip_special_tokens=False)
        return WindowDetokenizer(decode, pieces, prompt, alone=self._alone)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token, decoded alone; of a special token, its spelling."""
        return self._pieces[token]

    def token_text(self, token: int) -> str:
        """`token_bytes` as text; U+FFFD for bytes that are not complete characters."""
        return self._pieces[token].decode("utf-8", "replace")

    def token_id(self, content: str) -> int | None:
        """The id of the token with this text; None if there is none."""
        found: int | None = self._backend.token_to_id(content)
        return found

    def _check_lens(self, texts: Sequence[str], context_len: int) -> None:
        """Refuse a text with more characters than `context_len` tokens can have."""
        longest = max(map(len, texts), default=0)
        if longest > context_len * self.longest_token:
            raise ContextExceeded(
                "prompt",
                f"the prompt has {longest:,} characters; "
                f"no context of {context_len:,} tokens holds it",
            )


class _Pieces(dict[int, bytes]):
    """The bytes of each token, computed at its first use: few tokens of a vocabulary are used."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        is_byte_level: bool,
        skipped: frozenset[int],
    ) -> None:
        super().__init__()
        self._backend = backend
        self._is_byte_level = is_byte_level
        self._falls_back = "ByteFallback" in _decoder_types(backend)
        self._skipped = skipped

    def __missing__(self, token: int) -> bytes:
        spelled = None
        if token not in self._skipped:
            # Also None for a token of a model's padded vocabulary that the tokenizer lacks.
            spelled = self._backend.id_to_token(token)
        if spelled is None:
            piece = b""
        elif self._is_byte_level:
            try:
                piece = bytes(map(_BYTE_OF.__getitem__, spelled))
            except KeyError:
                piece = spelled.encode()  # the spelling of an added token is its text
        elif self._falls_back and _BYTE_TOKEN.fullmatch(spelled):
            piece = bytes([int(spelled[3:5], 16)])
        else:
            piece = spelled.replace("▁", " ").encode()
        self[token] = piece
        return piece


def _num_chars(one: str | tuple[str, str]) -> int:
    if isinstance(one, str):
        return len(one)
    first, second = one
    return len(first) + len(second)


def _slices(items: Sequence[T], num_chars: Callable[[T], int]) -> Iterator[tuple[Sequence[T], int]]:
    """`items` in slices of at most `SLICE_LEN` characters, or of one item. Yields each slice and
    its number of characters."""
    begin = 0
    length = 0
    for index, item in enumerate(items):
        own = num_chars(item)
        if length + own > SLICE_LEN and index > begin:
            yield items[begin:index], length
            begin = index
            length = 0
        length += own
    if begin < len(items):
        yield items[begin:], length


def _fitting_lens(lens: Sequence[int], room: int) -> list[int]:
    """Lengths of one or two texts whose sum fits into `room`: the longer text is cut first."""
    room = max(room, 0)
    if sum(lens) <= room or len(lens) == 1:
        return [min(length, room) for length in lens]
    first, second = lens
    half = room // 2
    if second <= half:
        return [room - second, second]
    kept = min(first, room - half)
    return [kept, room - kept]


def _byte_alphabet() -> dict[str, int]:
    """The byte of each printable character of byte-level BPE.

    Source: GPT-2, `bytes_to_unicode` in github.com/openai/gpt-2/blob/master/src/encoder.py.
    """
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {chr(byte): byte for byte in printable}
    # The other bytes map to the characters from 256 on, in order.
    code = 256
    for byte in range(256):
        if byte not in printable:
            alphabet[chr(code)] = byte
            code += 1
    return alphabet


_BYTE_OF = _byte_alphabet()


def _is_byte_level(backend: tokenizers.Tokenizer) -> bool:
    """Whether the decoder only maps the characters of tokens to bytes."""
    return _decoder_types(backend) == ["ByteLevel"]


def _decoder_types(backend: tokenizers.Tokenizer) -> list[str]:
    """The types of the steps of the decoder, in order."""
    if backend.decoder is None:
        return []
    decoder = msgspec.json.decode(backend.decoder.__getstate__())
    steps = [decoder]
    if decoder.get("type") == "Sequence":
        steps = decoder["decoders"]
    return [str(step.get("type")) for step in steps]


def _read_json(path: Path) -> JsonObject:
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=JsonObject)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise TokenizerError(f"{path} is not the JSON object it should be: {exc}") from exc


def _named_tokens(config: JsonObject, names: Iterable[str]) -> dict[str, str]:
    """The special tokens of a configuration that have these names."""
    return {name: _content(config[name]) for name in names if config.get(name)}


def _content(token: Any) -> str:
    """The text of a special token, which is a string or an object with `content`."""
    content = token
    if isinstance(token, dict):
        content = token.get("content")
    if not isinstance(content, str):
        raise TokenizerError(f"tokenizer_config.json: {token!r} is not a special token")
    return content


def _chat_templates(folder: Path, config: JsonObject) -> dict[str, str]:
    """Chat templates by name, from the files where older and newer models store them; the newest
    file takes precedence."""
    further: dict[str, str] = {}
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        further[path.stem] = _read_template(path)
    jinja = folder / "chat_template.jinja"
    if jinja.is_file():
        return further | {"default": _read_template(jinja)}
    template = _read_json(folder / "chat_template.json").get("chat_template")
    template = template or config.get("chat_template")
    if template is None:
        return further
    if isinstance(template, str):
        return further | {"default": template}
    try:
        named = {str(entry["name"]): str(entry["template"]) for entry in template}
        return named | further
    except (KeyError, TypeError) as exc:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'}: chat_template has no known form"
        ) from exc


def _read_template(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise TokenizerError(f"{path} is not UTF-8: {exc}") from exc
