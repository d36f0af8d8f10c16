"""Small tokenizers that tests can count by hand."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from weft.text.tokenizer import _BYTE_OF
from weft.text.tokenizer import Tokenizer as WeftTokenizer

BOS = 256
EOS = 257
IM_START = 258
IM_END = 259
SPECIALS = ["<bos>", "<eos>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_CHAR_OF = {byte: char for char, byte in _BYTE_OF.items()}


def byte_backend(merges: list[tuple[bytes, bytes]] | None = None) -> Tokenizer:
    """Byte-level BPE: ids 0 to 255 are the bytes, then four special tokens, then one per merge."""

    def spelled(piece: bytes) -> str:
        return "".join(_CHAR_OF[byte] for byte in piece)

    vocab = {_CHAR_OF[byte]: byte for byte in range(256)}
    for number, (left, right) in enumerate(merges or []):
        vocab[spelled(left + right)] = 256 + len(SPECIALS) + number
    for number, special in enumerate(SPECIALS):
        vocab[special] = 256 + number
    backend = Tokenizer(
        models.BPE(vocab=vocab, merges=[(spelled(a), spelled(b)) for a, b in merges or []])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(special, special=True) for special in SPECIALS])
    return backend


def infill_tokenizer(*names: str) -> WeftTokenizer:
    """As `byte_tokenizer`, with the further special tokens `names`, from id 260 on."""
    backend = byte_backend()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names])
    return WeftTokenizer(
        backend, {"bos_token": "<bos>", "eos_token": "<eos>"}, {"default": CHAT_TEMPLATE}
    )


def byte_tokenizer(merges: list[tuple[bytes, bytes]] | None = None) -> WeftTokenizer:
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    return WeftTokenizer(byte_backend(merges), special, {"default": CHAT_TEMPLATE})


def sentencepiece_backend(pieces: list[str]) -> Tokenizer:
    """Like Llama 2: pieces with "▁" for space, byte fallback, and a space before the text.

    Decoding strips that space from any ids, also from those in the middle of a text.

    Ids 0 to 255 are the bytes, then the special <s>, then the pieces.
    """
    backend = Tokenizer(models.BPE(vocab=_fallback_vocab(pieces), merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def metaspace_backend(pieces: list[str]) -> Tokenizer:
    """Like newer Mistral and T5: the decoder leaves out every "▁" of the first token."""
    backend = Tokenizer(models.BPE(vocab=_fallback_vocab(pieces), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def plain_space_backend(pieces: list[str]) -> Tokenizer:
    """Like Gemma: nothing is put before the text, and nothing stripped."""
    backend = Tokenizer(models.BPE(vocab=_fallback_vocab(pieces), merges=[], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def wordpiece_backend(pieces: list[str]) -> Tokenizer:
    """Like BERT: a space before each token, but the first and those that begin with ##."""
    vocab = {"[UNK]": 0, "<s>": 1} | {piece: 2 + place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def word_end_backend(pieces: list[str]) -> Tokenizer:
    """Like the first GPT: </w> ends a word; it is a space, but at the end of the text."""
    vocab = {"<s>": 0} | {piece: 1 + place for place, piece in enumerate(pieces)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    backend.decoder = decoders.BPEDecoder()
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    return backend


def _fallback_vocab(pieces: list[str]) -> dict[str, int]:
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab["<s>"] = 256
    for piece in pieces:
        vocab[piece] = len(vocab)
    return vocab
