"""The tokenizer of the bundled models: byte-level BPE of 4096 tokens, with indentation as single tokens. Any text
encodes, and decoding gives it back exactly. Knows nothing about models.
"""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
END_OF_TEXT_ID, IM_START_ID, IM_END_ID = range(3)
SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END, *(f"<|reserved_{i}|>" for i in range(5)))

# A line break takes the indentation after it along, so a word that begins a line is the same token as inside brackets.
# Else: a word with the blank, dot or underscore before it; up to three digits; punctuation; blanks, the last one left
# to the word after it.
PIECES = r"\r?\n\s*|[ ._]?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def train(texts: Iterable[str], vocab_size: int = VOCAB_SIZE) -> Tokenizer:
    """A tokenizer of at most `vocab_size` tokens, special ones first; every byte has a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
