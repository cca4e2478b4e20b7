"""Spans, rows, rings and bytes of the cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jaxprs import equations, indexed_axes

from v41jax import cache, config, quant
from v41jax.cache import DROP, EntryPool, Span

cfg = config.tiny
X64 = pytest.mark.parametrize("x64", [False, True])


def span(start, length, width):
    return Span(jnp.array(start, jnp.int32), jnp.array(length, jnp.int32), width)


# ---- Span


@X64
def test_span_counts(x64):
    with jax.enable_x64(x64):
        s = span([0, 5], [3, 1], 4)
        parts = s.position_BT, s.visible_BT(1), s.visible_BT(2), s.visible_BT(3), s.end_B
        assert all(part.dtype == jnp.int32 for part in parts)
        position, one, two, three, end = (np.asarray(part) for part in parts)
        valid = np.asarray(s.valid_BT)
    np.testing.assert_array_equal(position, [[0, 1, 2, 3], [5, 6, 7, 8]])
    np.testing.assert_array_equal(valid, [[True, True, True, False], [True, False, False, False]])
    np.testing.assert_array_equal(one, [[1, 2, 3, 0], [6, 0, 0, 0]])
    np.testing.assert_array_equal(two, [[0, 1, 1, 0], [3, 0, 0, 0]])
    np.testing.assert_array_equal(three, [[0, 0, 1, 0], [2, 0, 0, 0]])
    np.testing.assert_array_equal(end, [3, 6])


def test_no_query_sees_what_a_later_token_completes():
    # 6 queries, ratio 2: entry j is of tokens 2j and 2j + 1.
    np.testing.assert_array_equal(span([0], [6], 6).visible_BT(2), [[0, 1, 1, 2, 2, 3]])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 9])
def test_last_keeps_the_newest_tokens_of_every_row(width):
    lengths, starts = [0, 1, 2, 4, 5], [0, 3, 9, 1, 2]
    short, crop = span(starts, lengths, 5).last(width)
    x = np.arange(25 * 2).reshape(5, 5, 2)
    cropped = crop({"x": jnp.asarray(x), "none": None})["x"]
    assert short.width == cropped.shape[1] == min(width, 5)
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        kept = min(length, width)
        assert (int(short.start_B[b]), int(short.length_B[b])) == (start + length - kept, kept)
        np.testing.assert_array_equal(cropped[b, :kept], x[b, length - kept : length])


# ---- rows


def test_take_rows():
    packed = quant.Packed(jnp.arange(24, dtype=jnp.uint8).reshape(2, 4, 3), jnp.zeros((2, 4, 1), jnp.uint8), None)
    index = np.array([[[3, 0], [1, 1]], [[2, -1], [9, 3]]], np.int32)  # -1 and 9 bring some row; callers mask them
    got = cache.take_rows(packed, jnp.asarray(index)).codes
    for b, t, k in np.ndindex(index.shape):
        np.testing.assert_array_equal(got[b, t, k], packed.codes[b, np.clip(index[b, t, k], 0, 3)])


def test_a_dropped_row_is_written_nowhere():
    before = jnp.arange(16).reshape(2, 8, 1)
    got = cache.put_rows(before, jnp.array([[3, DROP], [DROP, DROP]], jnp.int32), jnp.full((2, 2, 1), 99))
    want = np.arange(16).reshape(2, 8, 1)
    want[0, 3] = 99
    np.testing.assert_array_equal(got, want)


def test_rows_are_indexed_by_sequence_and_row():
    # No flat index: sequences x rows x bytes pass 2^31 in a cache of ordinary size.
    plane = jax.ShapeDtypeStruct((64, 2**20, 288), jnp.uint8)
    index, rows = jax.ShapeDtypeStruct((64, 2), jnp.int32), jax.ShapeDtypeStruct((64, 2, 288), jnp.uint8)
    scatters = [e for e in equations(cache.put_rows, plane, index, rows) if e.primitive.name == "scatter"]
    gathers = [e for e in equations(cache.take_rows, plane, index) if e.primitive.name == "gather"]
    assert len(scatters) == len(gathers) == 1
    assert [indexed_axes(equation) for equation in (*scatters, *gathers)] == [2, 2]


def pool(batch, entries, width=4):
    plane = quant.quantize(jnp.zeros((batch, entries, width)), None)
    return EntryPool(plane, plane, *[jnp.zeros((batch, 0, width))] * 2, jnp.zeros((batch,), jnp.int32))


@X64
def test_append_entries_writes_the_counted_ones(x64):
    with jax.enable_x64(x64):
        new = quant.quantize(1 + jnp.arange(3 * 3 * 4, dtype=jnp.float32).reshape(3, 3, 4), None)
        keys = quant.quantize(-new.codes, None)
        first, count = jnp.array([0, 4, 1], jnp.int32), jnp.array([3, 3, 0], jnp.int32)
        got = jax.jit(cache.append_entries)(pool(3, 6), new, keys, first, count)
    want = np.zeros((3, 6, 4), np.float32)
    want[0, 0:3], want[1, 4:6] = new.codes[0], new.codes[1, :2]  # what passes the capacity is dropped
    np.testing.assert_array_equal(got.entries.codes, want)
    np.testing.assert_array_equal(got.keys.codes, -want)


# ---- the ring


@X64
@pytest.mark.parametrize("slots", [1, 4, 5])
def test_ring_writes(slots, x64):
    rng = np.random.default_rng(slots)
    ring = np.zeros((3, slots, 1))
    position = np.zeros(3, np.int64)
    with jax.enable_x64(x64):
        window = quant.quantize(jnp.zeros((3, slots, 1)), None)
        write = jax.jit(cache.write_window)
        for width in (1, 3, 2 * slots + 3, 1, slots):
            length = rng.integers(0, width + 1, 3)
            rows = rng.standard_normal((3, width, 1)).astype(np.float32)
            window = write(window, quant.quantize(jnp.asarray(rows), None), span(position, length, width))
            for b in range(3):
                for t in range(length[b]):
                    ring[b, (position[b] + t) % slots] = rows[b, t]
            position += length
            np.testing.assert_array_equal(window.codes, ring)


def test_no_slot_is_written_twice_in_a_call(monkeypatch):
    # Which of two writes to one place wins is left open by XLA.
    written = []
    monkeypatch.setattr(cache, "put_rows", lambda window, index, rows: written.append(np.asarray(index)) or window)
    plane = quant.Packed(jnp.zeros((2, 4, 1)), jnp.zeros((2, 4, 0), jnp.uint8), None)
    cache.write_window(plane, plane, span([3, 6], [11, 2], 11))
    slots = [sorted(index for index in row if index != DROP) for row in written[0].tolist()]
    assert slots == [[0, 1, 2, 3], [2, 3]]


@X64
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("first", [0, 3, -2])
def test_window_index(slots, first, x64):
    starts, lengths, width = [0, 2, 9, 7], [5, 3, 6, 0], 6
    with jax.enable_x64(x64):
        s = span(starts, lengths, width)
        held = s.start_B
        got = jax.jit(functools.partial(cache.window_index, slots))(s, held, jnp.full((4,), first, jnp.int32))
        assert got.dtype == jnp.int32
    for b, t in np.ndindex(4, width):
        want = []
        if t < lengths[b]:
            for p in oracle.window_positions(starts[b] + t, slots, first):
                want.append(slots + p - starts[b] if p >= starts[b] else p % slots)
        np.testing.assert_array_equal(got[b, t], [-1] * (slots - len(want)) + want)


def test_a_ring_that_skipped_positions_shows_none_of_them():
    # Replay: columns start at 9, but the ring ends at 6; positions 6 to 8 have no row.
    held, first = jnp.array([6], jnp.int32), jnp.array([0], jnp.int32)
    got = jax.jit(functools.partial(cache.window_index, 4))(span([9], [1], 1), held, first)
    np.testing.assert_array_equal(got, [[[-1, -1, -1, 4]]])


# ---- allocation


def test_bytes_of_the_released_model():
    assert cache.bytes_per_token(config.v41_flash) == 890
    assert cache.window_bytes(config.v41_flash) == 40 * 128 * 528 == 2_703_360


def test_bytes_per_token_are_read_off_the_arrays():
    entry, key = 32 // 2 + 32 // 16, 32 // 2 + 32 // 32
    assert cache.bytes_per_token(cfg) == 2 * (entry + key) / 2 + (entry + key)
    plain = dataclasses.replace(cfg, formats=config.UNQUANTIZED)
    assert cache.bytes_per_token(plain) == 2 * 4 * (32 + 32)
    thirds = dataclasses.replace(cfg, compress_ratios=(0, 3, 3, 3, 1, 1, 1, 1, 1, 0, 0))
    assert cache.bytes_per_token(thirds) == pytest.approx((entry + key) * 5 / 3, rel=1e-12)
    none = dataclasses.replace(
        cfg, compress_ratios=(0,) * 9, kv_source_layer_ids=(), index_source_layer_ids=(), candidate_source_layer_id=None
    )
    assert cache.bytes_per_token(none) == 0


def test_an_empty_cache():
    empty = cache.init_cache(cfg, 3, 21)
    assert len(empty.windows) == 9 and len(empty.pools) == 3
    assert {w.codes.shape for w in empty.windows} == {(3, 8, 32)}
    assert [p.entries.codes.shape for p in empty.pools] == [(3, 10, 16), (3, 10, 16), (3, 21, 16)]
    assert [p.partial_kv.shape for p in empty.pools] == [(3, 1, 32), (3, 1, 32), (3, 0, 32)]
    assert all(plane.dtype == jnp.uint8 for w in empty.windows for plane in jax.tree.leaves(w))
    np.testing.assert_array_equal(empty.ngram_BN, np.full((3, 3), -1))
    np.testing.assert_array_equal(empty.length_B, np.zeros(3))
    assert empty.capacity == 21


@pytest.mark.parametrize(
    "batch,capacity,message",
    [(0, 8, "batch=0"), (1, 1, "capacity=1 tokens; legal are 2"), (1, 2**24 + 1, "capacity=16777217.*to 16777216")],
)
def test_impossible_caches_are_refused(batch, capacity, message):
    with pytest.raises(ValueError, match=message):
        cache.init_cache(cfg, batch, capacity)
