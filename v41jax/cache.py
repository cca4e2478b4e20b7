"""The state of a batch of sequences: packed window rings, entry pools, and what is part-filled (section 6).

Everything is allocated once, for a capacity in tokens, and updated in place: every function takes arrays and returns
the same arrays with rows written, which XLA does without a copy when the cache is donated. Rows of the batch have
lengths of their own; a padded token writes nothing.
"""

import dataclasses

import jax
import jax.numpy as jnp

from v41jax import config, quant
from v41jax.config import Config
from v41jax.quant import Packed

DROP = 2**31 - 1  # an index past every array: a scatter with mode="drop" ignores it


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Span:
    """The tokens of one call: row b holds `length_B[b]` of them from column 0 on, the first at `start_B[b]`."""

    start_B: jax.Array  # i32, absolute position of column 0, in tokens
    length_B: jax.Array  # i32, tokens that are real
    width: int = dataclasses.field(metadata={"static": True})  # T, columns

    @property
    def position_BT(self):
        """i32 absolute position of every column."""
        return self.start_B[:, None] + jnp.arange(self.width, dtype=jnp.int32)

    @property
    def valid_BT(self):
        """Which columns are tokens and not padding."""
        return jnp.arange(self.width, dtype=jnp.int32) < self.length_B[:, None]

    @property
    def end_B(self):
        """i32 position after the last token."""
        return self.start_B + self.length_B

    def visible_BT(self, ratio: int):
        """i32 entries each query sees: its own group counts once complete; 0 for padding."""
        return jnp.where(self.valid_BT, (self.position_BT + 1) // ratio, 0)

    def first_BT(self, ratio: int) -> None:
        """The first entry each query may see; None: entry 0. Packed documents (`training`) start further on."""
        del ratio

    @property
    def reach_BT(self) -> None:
        """Tokens that may be looked back on from each; None: all the state remembers."""

    def last(self, width: int):
        """Keeps the last `width` tokens of each row: the shorter span, and a function that crops arrays [B, T, ...]."""
        if width >= self.width:
            return self, lambda tree: tree
        first_B = jnp.maximum(self.length_B - width, 0)
        column_BT = first_B[:, None] + jnp.arange(width, dtype=jnp.int32)
        span = Span(self.start_B + first_B, jnp.minimum(self.length_B, width), width)

        def crop(tree):
            return jax.tree.map(lambda a: take_rows(a, column_BT), tree)

        return span, crop


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EntryPool:
    """What one KV source keeps of all tokens, and of its part-filled group (ratio m > 1).

    entries: main KV, [B, S, H]; keys: index keys, [B, S, J]; S = capacity // m entries.
    partial_kv, partial_gate: f32 [B, m - 1, H], rows of the incomplete group, zeros behind them.
    kept_B: i32, so many first entries stay as they are: those of a prefix that was put there, and is fed once more in
      part only to fill the windows (prefill.md, replay).
    """

    entries: Packed
    keys: Packed
    partial_kv: jax.Array
    partial_gate: jax.Array
    kept_B: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """The state of a batch of sequences. Made by `init_cache`; `prefill` and `decode` take it and return the next."""

    windows: tuple[Packed, ...]  # one per layer, [B, W, H]; position p is in slot p mod W
    pools: tuple[EntryPool, ...]  # one per KV source
    ngram_BN: jax.Array  # i32 [B, N - 1], compressed ids of the last tokens, oldest first; -1 before the start
    length_B: jax.Array  # i32, tokens seen
    owed_B: jax.Array  # i32, prompt tokens that must follow before the decoder windows are exact (`prefill_encoder`)
    capacity: int = dataclasses.field(metadata={"static": True})  # tokens a row may hold


def init_cache(cfg: Config, batch: int, capacity: int) -> Cache:
    """Allocates an empty cache.

    Args:
      cfg: the model.
      batch: sequences.
      capacity: tokens each sequence may hold, prompt and answer together; chosen once.
    Raises:
      ValueError: a batch under 1, a capacity under one group of tokens or past exact float32 positions.
    """
    least = config.group_multiple(cfg)
    if batch < 1:
        raise ValueError(f"batch={batch}; a cache holds 1 sequence or more")
    if not least <= capacity <= 2**24:
        raise ValueError(f"capacity={capacity} tokens; legal are {least} (one group of every layer) to {2**24}")

    pools = []
    for layer in cfg.kv_source_layer_ids:
        ratio = cfg.compress_ratios[layer]
        pools.append(
            EntryPool(
                entries=_empty(batch, capacity // ratio, cfg.head_dim, cfg.formats.entry),
                keys=_empty(batch, capacity // ratio, cfg.index_head_dim, cfg.formats.index),
                partial_kv=jnp.zeros((batch, ratio - 1, cfg.head_dim), jnp.float32),
                partial_gate=jnp.zeros((batch, ratio - 1, cfg.head_dim), jnp.float32),
                kept_B=jnp.zeros((batch,), jnp.int32),
            )
        )
    history = cfg.engram_max_ngram_size - 1 if cfg.engram_layer_ids else 0
    return Cache(
        windows=tuple(empty_window(cfg, batch) for _ in range(cfg.num_hidden_layers)),
        pools=tuple(pools),
        ngram_BN=jnp.full((batch, history), -1, jnp.int32),
        length_B=jnp.zeros((batch,), jnp.int32),
        owed_B=jnp.zeros((batch,), jnp.int32),
        capacity=capacity,
    )


def empty_window(cfg: Config, batch: int) -> Packed:
    """Allocates one ring [B, W, H]."""
    return _empty(batch, cfg.sliding_window, cfg.head_dim, cfg.formats.window)


def _empty(batch: int, rows: int, width: int, format: str | None) -> Packed:
    shapes = quant.abstract((batch, rows, width), format)
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def take_rows(array, index_BTK):
    """Gathers rows of [B, S, ...] (a Packed too) by i32 index [B, ...]; the caller masks what -1 brought."""
    safe = jnp.clip(index_BTK, 0)

    def take(plane):
        row = jnp.arange(plane.shape[0], dtype=jnp.int32).reshape(-1, *[1] * (safe.ndim - 1))
        return plane.at[row, safe].get(mode="clip")

    return jax.tree.map(take, array)


def put_rows(array, index_BT, rows):
    """Writes rows [B, T, ...] into [B, S, ...] (a Packed too) at i32 indices [B, T]; -1 and DROP write nothing."""
    index_BT = jnp.where(index_BT < 0, DROP, index_BT)  # else -1 is the last row

    def put(plane, new):
        row = jnp.arange(plane.shape[0], dtype=jnp.int32)[:, None]
        return plane.at[row, index_BT].set(new.astype(plane.dtype), mode="drop")

    return jax.tree.map(put, array, rows)


def append_entries(pool: EntryPool, entries: Packed, keys: Packed, first_B, count_B) -> EntryPool:
    """Writes the first `count_B` of new entries and keys [B, G, ...] from entry `first_B` on.

    An entry past the capacity is dropped; `prefill` and `decode` refuse such a call before it runs.
    """
    group = jnp.arange(entries.codes.shape[1], dtype=jnp.int32)
    entry_BG = first_B[:, None] + group
    new_BG = (group < count_B[:, None]) & (entry_BG >= pool.kept_B[:, None])
    index_BG = jnp.where(new_BG, entry_BG, DROP)
    return dataclasses.replace(
        pool, entries=put_rows(pool.entries, index_BG, entries), keys=put_rows(pool.keys, index_BG, keys)
    )


def write_window(window: Packed, rows: Packed, span: Span) -> Packed:
    """Writes each row's last W tokens [B, T, ...] into the ring, position p at slot p mod W."""
    slots = window.codes.shape[1]
    column = jnp.arange(span.width, dtype=jnp.int32)
    newest_BT = span.valid_BT & (column >= span.length_B[:, None] - slots)
    return put_rows(window, jnp.where(newest_BT, span.position_BT % slots, DROP), rows)


def window_index(slots: int, span: Span, held_B, first_B, *, in_ring: bool = False):
    """Finds every query's window rows in the ring followed by the call's own rows.

    Args:
      slots: W, rows of the ring.
      span: the queries, whose rows stand behind the ring at W, W + 1, ...
      held_B: i32, tokens seen before this call: the ring holds positions below it.
      first_B: i32, the earliest position a query may see; 0 but for bounded replay.
      in_ring: the call's rows are in the ring already, and nothing is behind it.
    Returns:
      i32 [B, T, W] into W + T rows, or W; by ascending position; -1 where there is no such row.
    """
    position = span.position_BT[..., None] + jnp.arange(1 - slots, 1, dtype=jnp.int32)
    start, held, first = (a[:, None, None] for a in (span.start_B, held_B, first_B))
    index = position % slots
    if not in_ring:
        index = jnp.where(position >= start, slots + position - start, index)
    there = (position >= jnp.maximum(first, 0)) & ((position >= start) | (position < held))
    return jnp.where(there & span.valid_BT[..., None], index, -1)


def bytes_per_token(cfg: Config) -> int | float:
    """Bytes one more token adds to the cache of a sequence: 890 for `v41_flash`. Read off real cache arrays."""
    multiple = config.group_multiple(cfg)
    sizes = [_nbytes(jax.eval_shape(lambda n=n: init_cache(cfg, 1, n * multiple))) for n in (1, 2)]
    whole, rest = divmod(sizes[1] - sizes[0], multiple)
    return whole if rest == 0 else (sizes[1] - sizes[0]) / multiple


def window_bytes(cfg: Config) -> int:
    """Bytes of window rows a sequence keeps at any length: 2,703,360 for `v41_flash`."""
    return _nbytes(jax.eval_shape(lambda: init_cache(cfg, 1, config.group_multiple(cfg)).windows))


def _nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
