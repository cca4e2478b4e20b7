"""A byte-level BPE tokenizer with the special tokens of the released encoding.

Any text can be encoded, because single bytes are tokens; digits are never merged, so that a number of n digits is n
tokens. Ids 0, 1 and 2 begin a document, end it and pad, as in the released config.json.
"""

from collections.abc import Iterable

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = (  # their ids are their places
    "<｜begin▁of▁sentence｜>",
    "<｜end▁of▁sentence｜>",
    "<｜▁pad▁｜>",
    "<｜User｜>",
    "<｜Assistant｜>",
    "<think>",
    "</think>",
    "<｜place▁holder▁no▁0｜>",  # stands for a token yet to be drafted (`dspark_noise_token_id`)
)
SMALLEST = len(SPECIAL_TOKENS) + 256


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learns merges from texts, deterministically.

    Args:
      texts: read once; at least enough of them for the merges wanted.
      vocab_size: ids, special tokens and the 256 bytes among them.
    Returns:
      A tokenizer of exactly `vocab_size` ids.
    Raises:
      ValueError: a vocabulary below the special tokens and bytes, or one the texts are too few for.
    """
    if vocab_size < SMALLEST:
        raise ValueError(f"vocab_size={vocab_size}; the special tokens and all bytes alone are {SMALLEST}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(  # type: ignore[assignment]
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    learned = tokenizer.get_vocab_size()
    if learned != vocab_size:
        raise ValueError(
            f"the texts give {learned} tokens, not vocab_size={vocab_size}; give more text, or ask for less"
        )
    return tokenizer
