"""Documents to training batches: packed into rows once, then drawn by grain in an order any host can recompute.

A row holds whole documents as long as they fit; a document longer than a row is cut at every `row_length` tokens, and
each piece counts as a document: nothing attends across the cut. Pieces are packed first-fit among the last `OPEN_ROWS`
rows that have room. What is left of a row is padding: token 0, document -1.
"""

import collections
from collections.abc import Sequence
from typing import Protocol

import grain
import numpy as np

from v41jax.training.corpus import Corpus

OPEN_ROWS = 64  # rows a piece may still join; more would pack a little tighter, and slower

Row = dict[str, np.ndarray]  # {"tokens_BT": i32 [T], "document_BT": i32 [T]}; B comes with batching


class RowSource(Protocol):
    """Rows by number: the same number gives the same row, in any order and on any host."""

    def __len__(self) -> int:
        """Rows there are."""
        ...

    def __getitem__(self, index: int) -> Row:
        """Makes one row."""
        ...


def make_row(documents: Sequence[np.ndarray], row_length: int, *, multiple: int = 1) -> Row:
    """Lays documents side by side, numbered 0, 1, 2 ..., each from a multiple of `multiple` on; padding between."""
    tokens_T, document_T = np.zeros(row_length, np.int32), np.full(row_length, -1, np.int32)
    start = 0
    for number, document in enumerate(documents):
        stop = start + len(document)
        assert stop <= row_length, (stop, row_length)
        tokens_T[start:stop], document_T[start:stop] = document, number
        start = _up(stop, multiple)
    return {"tokens_BT": tokens_T, "document_BT": document_T}


def _up(tokens: int, multiple: int) -> int:
    return tokens + -tokens % multiple


def plan_rows(start_K: np.ndarray, row_length: int, *, multiple: int = 1) -> list[list[tuple[int, int]]]:
    """Assigns every token to a row: for each row, the (start, stop) of its pieces."""
    rows: list[list[tuple[int, int]]] = []
    room: collections.OrderedDict[int, int] = collections.OrderedDict()  # open rows, oldest first
    for first, last in zip(start_K[:-1].tolist(), start_K[1:].tolist(), strict=True):
        for start in range(first, last, row_length):
            stop = min(start + row_length, last)
            length = _up(stop - start, multiple)
            row = next((number for number, free in room.items() if free >= length), None)
            if row is None:
                row = len(rows)
                rows.append([])
                room[row] = row_length
            rows[row].append((start, stop))
            room[row] -= length
            if room[row] == 0:
                del room[row]
            if len(room) > OPEN_ROWS:
                room.popitem(last=False)
    return rows


class PackedRows:
    """The rows of a corpus."""

    def __init__(self, corpus: Corpus, row_length: int, *, multiple: int = 1):
        """Plans the packing; documents begin at multiples of `multiple` tokens, of which a row is some."""
        if row_length < 2:
            raise ValueError(f"row_length={row_length}; a row needs 2 tokens, one to see and one to predict")
        if row_length % multiple:
            raise ValueError(
                f"row_length={row_length} is not a multiple of {multiple}, the compressed groups of a candidate block; "
                f"try {_up(row_length, multiple)}"
            )
        self._tokens, self._row_length, self._multiple = corpus.tokens_N, row_length, multiple
        self._rows = plan_rows(corpus.start_K, row_length, multiple=multiple)

    def __len__(self) -> int:
        """Rows there are."""
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        """Cuts one row out of the corpus."""
        pieces = [self._tokens[start:stop] for start, stop in self._rows[index]]
        return make_row(pieces, self._row_length, multiple=self._multiple)

    @property
    def filled(self) -> float:
        """The share of columns that hold tokens."""
        return self._tokens.size / (len(self) * self._row_length)


def train_batches(
    sources: Sequence[tuple[RowSource, float]],
    *,
    batch_size: int,
    seed: int,
    host: int = 0,
    hosts: int = 1,
) -> grain.DatasetIterator:
    """Draws batches without end.

    Args:
      sources: row sources and their shares, which need not sum to 1. Each is gone through once before any row returns,
        in an order that differs from pass to pass.
      batch_size: rows of a batch on all hosts together.
      seed: of the orders.
      host, hosts: this host's number and their count; host h gets every `hosts`-th row of the common order.
    Returns:
      An iterator over {"tokens_BT", "document_BT"}, i32 [batch_size / hosts, T]. Its `get_state()` is a small dict for
      JSON, equal on all hosts, and `set_state` continues with the batch that would have come next.
    Raises:
      ValueError: an empty source, no positive share, or a batch the hosts cannot share.
    """
    if batch_size < 1 or batch_size % hosts:
        raise ValueError(f"batch_size={batch_size} is not a positive multiple of the {hosts} hosts")
    sources = [(source, share) for source, share in sources if share > 0]
    if not sources or not all(len(source) for source, _ in sources):
        raise ValueError("the data has no row; give at least one document and one share over 0")
    endless = [
        grain.MapDataset.source(source).shuffle(seed=seed + number).repeat()
        for number, (source, _) in enumerate(sources)
    ]
    total = sum(share for _, share in sources)
    rows = grain.MapDataset.mix(endless, weights=[share / total for _, share in sources])
    batches = rows[host::hosts].batch(batch_size // hosts, drop_remainder=True)
    return iter(batches.to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)))


def valid_batches(source: RowSource, *, batch_size: int, limit: int | None = None):
    """Yields every row once, or the first `limit` batches, in order; the last batch is filled up with padding rows."""
    count = -(-len(source) // batch_size)
    for number in range(count if limit is None else min(limit, count)):
        rows = [source[i] for i in range(number * batch_size, min((number + 1) * batch_size, len(source)))]
        rows += [make_row([], len(rows[0]["tokens_BT"]))] * (batch_size - len(rows))
        yield {name: np.stack([row[name] for row in rows]) for name in rows[0]}
