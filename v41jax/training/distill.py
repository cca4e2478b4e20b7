"""What attention teaches the indexer: the mass each head gives to every entry, in logarithms (training.md).

A head's softmax runs over its whole denominator: window rows, the entries it attends to, and the sink. Work goes in
blocks of queries, so that nothing is ever made for all queries and all entries.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.blocks import by_query_block, fitting
from pallas_kernels.gather_attention.reference import gather
from pallas_kernels.index_scores.reference import weighted_relu, weighted_sum
from pallas_kernels.products import contract
from pallas_kernels.scatter import gathered_products
from v41jax import quant
from v41jax.cache import take_rows
from v41jax.quant import Packed
from v41jax.training import losses
from v41jax.training.packing import Documents


class Lesson(NamedTuple):
    """One layer's attention, as it teaches: float [B, T, N, H], f32 [N], and its window rows [B, T, H]."""

    query_BTNH: jax.Array
    sink_N: jax.Array
    window: Packed


class Pupil(NamedTuple):
    """One indexer, differentiable: index queries [B, T, I, J], f32 weights [B, T, I], keys [B, S, J]."""

    query_BTIJ: jax.Array
    weight_BTI: jax.Array
    key_BSJ: jax.Array


class Range(NamedTuple):
    """The entries a query may see, i32 [B, T]: from `first` up to below `visible`."""

    first: jax.Array
    visible: jax.Array

    def seen(self, entries: int):
        """bool [B, T, S]."""
        entry = jnp.arange(entries, dtype=jnp.int32)
        return (entry >= self.first[..., None]) & (entry < self.visible[..., None])


def entry_range(documents: Documents, ratio: int) -> Range:
    """Reads off what every query sees."""
    return Range(documents.first_BT(ratio), documents.visible_BT(ratio))


def _scores(query_BTNH, sink_N, windows, seen_BTW, rows, seen_BTE):
    """f32 scaled scores [B, T, N, W] and [B, T, N, E], -inf where not seen, and the log of each head's denominator.

    `windows` and `rows` are [B, E, H], the same for all queries, or [B, T, E, H].
    """
    scale = jnp.float32(query_BTNH.shape[-1] ** -0.5)

    def score(rows):
        return contract("btnh,beh->btne" if rows.ndim == 3 else "btnh,bteh->btne", query_BTNH, rows) * scale

    near, far = score(windows), score(rows)
    near = jnp.where(seen_BTW[:, :, None], near, -jnp.inf)
    far = jnp.where(seen_BTE[:, :, None], far, -jnp.inf)
    sink = jnp.broadcast_to(sink_N[:, None], (*near.shape[:3], 1))
    return near, far, jax.nn.logsumexp(jnp.concatenate([near, far, sink], axis=-1), axis=-1)


def log_mass(lessons: list[Lesson], window_BTW, rows, seen_BTE):
    """Sums attention probabilities over heads and lessons: f32 [B, T, E] logarithms, -inf where not seen."""
    parts = []
    for query, sink, window in lessons:
        windows = gather((window.codes, window.scales), None, window_BTW, None, window.format, None, query.dtype)
        _, far, total = _scores(query, sink, *windows, rows, seen_BTE)
        parts.append(far - total[..., None])
    return jax.nn.logsumexp(jnp.concatenate(parts, axis=2), axis=2)


def attend_all(query_BTNH, sink_N, window_BTH, count_BT, rows_BSH, seen: Range, *, slots: int):
    """Attends to the window and to every visible entry: what `gather_attention` does with all of them selected.

    Query t sees the `count_BT` window rows, at most `slots`, that end in row t. Window rows and entries are finite
    floats of the query's dtype; all of them, the query and the sink get gradients. A block of queries reads its window
    rows in one piece, so that no gradient has to be added up row by row.
    """
    T, S = query_BTNH.shape[1], rows_BSH.shape[1]
    block = min(_queries_at_once(1, query_BTNH, slots, S), T)
    window = jnp.pad(window_BTH, ((0, 0), (slots - 1, -T % block), (0, 0)))  # row t - back is at t + slots - 1 - back
    back_QR = (jnp.arange(block) + slots - 1)[:, None] - jnp.arange(block + slots - 1)

    @jax.checkpoint
    def attend(query, count, column, seen):
        near_rows = lax.dynamic_slice_in_dim(window, column[0, 0], back_QR.shape[1], axis=1)
        seen_near = (back_QR >= 0) & (back_QR < count[..., None])
        near, far, total = _scores(query, sink_N, near_rows, seen_near, rows_BSH, seen.seen(S))
        near, far = (jnp.exp(part - total[..., None]).astype(query.dtype) for part in (near, far))
        out = contract("btnw,bwh->btnh", near, near_rows) + contract("btne,beh->btnh", far, rows_BSH)
        return out.astype(query.dtype)

    column = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), count_BT.shape)
    return by_query_block(attend, block, query_BTNH, count_BT, column, seen)


def _queries_at_once(lessons: int, query_BTNH, slots: int, rows: int):
    """Bounds the scores of a block of queries over so many rows, and the window rows that every query has to itself."""
    B, _, N, H = query_BTNH.shape
    return fitting(4 * B * ((slots + rows) * N * lessons + slots * H))


def _blocks(fn, rows: int, lessons: list[Lesson], window_BTW, *arrays_BT):
    """Runs fn(lessons, window, *arrays) on blocks of queries, again in the backward pass; each has so many `rows`."""

    @jax.checkpoint
    def block(queries, *arrays):
        own = [lesson._replace(query_BTNH=query) for lesson, query in zip(lessons, queries, strict=True)]
        return fn(own, *arrays)

    at_once = _queries_at_once(len(lessons), lessons[0].query_BTNH, window_BTW.shape[2], rows)
    return by_query_block(block, at_once, [lesson.query_BTNH for lesson in lessons], window_BTW, *arrays_BT)


def sparse_kl(pupil: Pupil, lessons: list[Lesson], window_BTW, entries: Packed, entry_BTK):
    """KL of every query over its selected entries: f32 [B, T], 0 where there is none."""

    def block(lessons, window, query, weight, entry):
        seen = entry >= 0
        rows = quant.dequantize(take_rows(entries, entry), query.dtype)
        # An entry that is not seen may hold anything.
        mass = log_mass(lessons, window, jnp.where(seen[..., None], rows, 0), seen)
        scores = weighted_sum(gathered_products(query, pupil.key_BSJ.astype(query.dtype), entry), weight)
        return losses.kl(mass, scores, seen)

    return _blocks(block, entry_BTK.shape[2], lessons, window_BTW, pupil.query_BTIJ, pupil.weight_BTI, entry_BTK)


def dense_kl(pupil: Pupil, lessons: list[Lesson], window_BTW, entries: Packed, seen: Range):
    """KL of every query over all entries it sees: f32 [B, T], 0 where there is none."""
    rows = quant.dequantize(entries, lessons[0].query_BTNH.dtype)

    def block(lessons, window, query, weight, seen):
        seen_BTE = seen.seen(rows.shape[1])
        scores = weighted_relu("btij,bsj->btis", query, weight, pupil.key_BSJ, None, format=None)
        return losses.kl(log_mass(lessons, window, rows, seen_BTE), scores, seen_BTE)

    return _blocks(block, rows.shape[1], lessons, window_BTW, pupil.query_BTIJ, pupil.weight_BTI, seen)


def recall(lessons: list[Lesson], window_BTW, entries: Packed, entry_BTK, seen: Range):
    """The share of the mass of the K heaviest entries, dense attention, that the selection holds.

    Returns:
      f32 [B, T], and which queries count: those that see more than K entries, since the others select them all.
    """
    rows, K = quant.dequantize(entries, lessons[0].query_BTNH.dtype), entry_BTK.shape[-1]

    def block(lessons, window, entry, seen):
        seen_BTE = seen.seen(rows.shape[1])
        mass = log_mass(lessons, window, rows, seen_BTE)
        mass = jnp.where(seen_BTE.any(-1, keepdims=True), mass, 0)
        mass = jnp.exp(mass - mass.max(-1, keepdims=True))
        best = jax.lax.top_k(mass, K)[0].sum(-1)
        held = jnp.where(entry >= 0, jnp.take_along_axis(mass, jnp.maximum(entry, 0), axis=-1), 0).sum(-1)
        return held / best, seen_BTE.sum(-1) > K

    return _blocks(block, rows.shape[1], lessons, window_BTW, entry_BTK, seen)
