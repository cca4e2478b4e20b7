"""Passkey retrieval: keys hidden in code, asked for at the end; a task of any length with known answers.

A document says `# pass key A:48213` at random places of filler and ends in the same words for keys drawn from those
told. Everything follows from (seed, index), so any host can make any document at any time.
"""

import string
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from v41jax.config import Config
from v41jax.training.corpus import Corpus
from v41jax.training.data import Row, make_row

NAMES = string.ascii_uppercase
DIGITS = 5
MOST_DOCUMENTS = 64  # a training row holds 1, 2, 4, ... or so many documents
TOKENS_A_KEY = 32  # a training document has at most one key in so many tokens


class Passkey(NamedTuple):
    """One document, and which of its tokens are answers."""

    tokens_T: np.ndarray  # i32
    answer_T: np.ndarray  # bool; these tokens are determined by what stands before them


class PasskeyTask:
    """Makes passkey documents, and rows of them."""

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        *,
        cfg: Config,
        row_length: int,
        rows: int,
        seed: int,
        multiple: int = 1,
    ):
        """Takes filler from `corpus`; `rows` is only how many training rows count as one pass.

        Documents of a training row begin at multiples of `multiple` tokens.
        """
        special = [token for token in (cfg.bos_token_id, cfg.eos_token_id) if token is not None]
        self._filler = corpus.tokens_N[~np.isin(corpus.tokens_N, special)].astype(np.int32)
        if not self._filler.size:
            raise ValueError("the corpus holds special tokens only; passkeys need filler")
        self._tokenizer, self._row_length, self._rows, self._seed = tokenizer, row_length, rows, seed
        self._multiple = multiple
        self._begin = np.array([] if cfg.bos_token_id is None else [cfg.bos_token_id], np.int32)
        worst = self.shortest
        if row_length < worst:
            raise ValueError(f"row_length={row_length}; a passkey told and asked for takes {worst} tokens")

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    @property
    def shortest(self) -> int:
        """Tokens of a document with one key and no filler; no tokenizer gives a byte more than a token."""
        return len(self._begin) + 2 * len(_ask(NAMES[0]) + "0" * DIGITS + "\n")

    def document(self, index: int, *, length: int, keys: int = 1, depth: float | None = None) -> Passkey:
        """Makes a document of exactly `length` tokens that ends in its last answer.

        Args:
          index: which of the documents of this seed; every other argument may vary as well.
          length: tokens, the begin token and the last answer among them.
          keys: how many are told, under different names, and then asked for, in another order; 1 to 26.
          depth: where in the filler all are told, 0 front to 1 end; None draws a place for each.
        Raises:
          ValueError: more keys than names or than fit the length.
        """
        if not 1 <= keys <= len(NAMES):
            raise ValueError(f"keys={keys}; there are 1 to {len(NAMES)} names")
        draw = np.random.default_rng([self._seed, index, length, keys])
        names = draw.permutation(list(NAMES))[:keys].tolist()
        answers = [self._encode(f"{key:0{DIGITS}d}") for key in draw.integers(10**DIGITS, size=keys)]
        asks, newline = [self._encode(_ask(name)) for name in names], self._encode("\n")
        told = [np.concatenate([ask, answer, newline]) for ask, answer in zip(asks, answers, strict=True)]
        tail, is_answer = [], []
        for key in draw.permutation(keys):
            tail += [asks[key], answers[key]]
            is_answer += [np.zeros(len(asks[key]), bool), np.ones(len(answers[key]), bool)]
        free = length - sum(map(len, [self._begin, *told, *tail]))
        if free < 0:
            raise ValueError(f"length={length} is {-free} tokens too short for keys={keys} told and asked for")
        start = draw.integers(self._filler.size)
        filler = np.take(self._filler, np.arange(start, start + free), mode="wrap")
        cuts = np.sort(draw.integers(free + 1, size=keys)) if depth is None else [round(depth * free)] * keys
        pieces = np.split(filler, cuts)
        body = [part for piece, record in zip(pieces, [*told, []], strict=True) for part in (piece, record)]
        tokens_T = np.concatenate([self._begin, *body, *tail]).astype(np.int32)
        answer_T = np.zeros(length, bool)
        answer_T[length - sum(map(len, is_answer)) :] = np.concatenate(is_answer)
        return Passkey(tokens_T, answer_T)

    def __len__(self) -> int:
        """Training rows that count as one pass."""
        return self._rows

    def __getitem__(self, index: int) -> Row:
        """Makes a training row: 1, 2, 4, ... documents of equal length, each with as many keys as it draws."""
        draw = np.random.default_rng([self._seed, index])
        powers = (1 << n for n in range(MOST_DOCUMENTS.bit_length()))
        counts = [n for n in powers if self._length(n) >= self.shortest]
        count = int(draw.choice(counts))
        length = self._length(count)
        most = min(len(NAMES), max(1, length // TOKENS_A_KEY), length // self.shortest)
        # Indices from 2**32 on are for training, so no document of an evaluation is one of a training row.
        documents = [
            self.document((1 << 32) + index * MOST_DOCUMENTS + n, length=length, keys=int(draw.integers(1, most + 1)))
            for n in range(count)
        ]
        return make_row([document.tokens_T for document in documents], self._row_length, multiple=self._multiple)

    def _length(self, documents: int) -> int:
        """Tokens of each of so many documents in a training row."""
        return self._row_length // documents // self._multiple * self._multiple


def _ask(name: str) -> str:
    return f"\n# pass key {name}:"
