"""Packed rows: several documents side by side, each computed as if it were alone.

Every document begins at a column that is a multiple of `multiple(cfg)`, a whole candidate block of whole groups. So the
groups of a row are the groups of its documents, the block grid of a row is the grid of each of them, and entries need
no layout of their own: entry j of the row stands for columns j * ratio onward. A query sees a range of entries, whose
lower end is the first of a block. Against unpacking into a ragged batch this wastes less than one block a document
whatever the lengths are, and the operations of inference serve unchanged, with one more mask in `indexer.select`.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from v41jax import config
from v41jax.config import Config

STEPS = 4  # a row that alignment makes longer grows by quarters, so that few widths are ever compiled


def multiple(cfg: Config) -> int:
    """The columns a document's first token may stand at are multiples of this many tokens."""
    return config.group_multiple(cfg) * cfg.candidate_block_size


def align(batch: dict[str, np.ndarray], *, cfg: Config) -> dict[str, np.ndarray]:
    """Moves the documents of a packed batch to columns they may begin at.

    Args:
      batch: {"tokens_BT", "document_BT"}, i32 [B, T]; documents 0, 1, 2 ... in a row, -1 where there is none.
    Returns:
      The same batch where all documents begin right and T is a multiple; else new rows, wider by quarters of T as
      needed. Widths must agree among hosts, so a run on several needs rows that are laid out right (`data.make_row`).
    Raises:
      ValueError: documents that do not ascend in a row.
    """
    tokens_BT, document_BT = batch["tokens_BT"], batch["document_BT"]
    step = multiple(cfg)
    if document_BT.shape[1] % step == 0 and not np.any(misplaced(document_BT, step)):
        return batch
    rows = [_pieces(row) for row in document_BT]
    needed = max(sum(-(-(stop - start) // step) * step for start, stop in pieces) for pieces in rows)
    T = document_BT.shape[1]
    width = next(n for n in range(T, T * step + T, max(1, T // STEPS)) if n >= needed)
    width += -width % step
    out = {
        "tokens_BT": np.zeros((len(rows), width), np.int32),
        "document_BT": np.full((len(rows), width), -1, np.int32),
    }
    for b, pieces in enumerate(rows):
        first = 0
        for start, stop in pieces:
            out["tokens_BT"][b, first : first + stop - start] = tokens_BT[b, start:stop]
            out["document_BT"][b, first : first + stop - start] = document_BT[b, start]
            first += -(-(stop - start) // step) * step
    return out


def _pieces(document_T: np.ndarray) -> list[tuple[int, int]]:
    """The (start, stop) of each document of a row."""
    edges = [0, *(np.flatnonzero(np.diff(document_T)) + 1).tolist(), len(document_T)]
    pieces = [(a, b) for a, b in itertools.pairwise(edges) if document_T[a] >= 0]
    numbers = [int(document_T[a]) for a, _ in pieces]
    if numbers != sorted(set(numbers)):
        raise ValueError(f"document_BT has a row of documents {numbers}; numbers must ascend, one run of columns each")
    return pieces


def misplaced(document_BT, step: int):
    """Which columns begin a document where none may."""
    begins = document_BT[:, 1:] != document_BT[:, :-1]
    column = np.arange(1, document_BT.shape[1], dtype=np.int32)
    return begins & (document_BT[:, 1:] >= 0) & (column % step != 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Documents:
    """Where the tokens of packed rows stand; it answers what a `cache.Span` does."""

    document_BT: jax.Array  # i32, -1 where there is no token

    @property
    def width(self) -> int:
        """T, columns."""
        return self.document_BT.shape[1]

    @property
    def valid_BT(self):
        """Which columns are tokens."""
        return self.document_BT >= 0

    @property
    def position_BT(self):
        """i32 position of every column in its document."""
        column = jnp.arange(self.width, dtype=jnp.int32)
        begins = jnp.diff(self.document_BT, axis=1, prepend=jnp.int32(-2)) != 0
        return column - lax.cummax(jnp.where(begins, column, 0), axis=1)

    @property
    def reach_BT(self):
        """i32 tokens that may be looked back on from each."""
        return self.position_BT

    @property
    def start_B(self):
        """i32 [B], 0: no row continues another."""
        return jnp.zeros((self.document_BT.shape[0],), jnp.int32)

    @property
    def length_B(self):
        """i32 [B], T: what is no token is masked where it is read."""
        return jnp.full((self.document_BT.shape[0],), self.width, jnp.int32)

    def first_BT(self, ratio: int):
        """i32 first entry of each column's document; the first of a block."""
        column = jnp.arange(self.width, dtype=jnp.int32)
        return (column - self.position_BT) // ratio

    def visible_BT(self, ratio: int):
        """i32, the entries each query sees end below it: 0 where it sees none."""
        own = (self.position_BT + 1) // ratio
        return jnp.where(self.valid_BT & (own > 0), self.first_BT(ratio) + own, 0)

    def window_BTW(self, slots: int):
        """i32 columns of the last `slots` tokens of each query's document, itself last; -1 where there are fewer."""
        back = jnp.arange(1 - slots, 1, dtype=jnp.int32)
        there = (self.position_BT[..., None] + back >= 0) & self.valid_BT[..., None]
        return jnp.where(there, jnp.arange(self.width, dtype=jnp.int32)[:, None] + back, -1)

    @property
    def predicted_BT(self):
        """Which columns have a next token of the same document, to predict."""
        after = jnp.pad(self.document_BT[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
        return self.valid_BT & (after == self.document_BT)
