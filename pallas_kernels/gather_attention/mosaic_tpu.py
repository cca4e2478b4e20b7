"""Sparse gather-attention on TPU: one query a grid step, its rows brought to on-chip memory and attended to in one go.

Window rows are few, so XLA decodes them to bfloat16 first, and the kernel keeps those of one sequence on chip. Entries
stay packed in device memory, which hands out only whole tiles: 32 rows x 128 bytes. So for every id the kernel fetches
the 32 entries around it and, from the scales turned to [B, H / 16, S] (their layout in memory: no copy), 128 entries'
scales. It picks the row and the lane, all as integers, so that NaN in a neighbour reaches nothing. CHUNK entries are
picked and decoded while the next CHUNK arrive. Then one product gives the scores, a softmax with the sink the weights,
and a second product the result. Every listed id is a row of its own, so any list is right, repeats included.

A byte of codes is an even and an odd channel. The kernel keeps all even channels before all odd ones; the query is
split so outside, and the result joined.

A query reads (16 H + 8 H) bytes an entry for the H / 2 + H / 16 it needs, a factor of 43: at K = 512, H = 512 6.3 MB,
7.7 us at 0.82 TB/s. A query multiplies 4 N H (W + K) FLOP: 84 MFLOP at N = 64, W = 128.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import formats as bits
from pallas_kernels.quantize.reference import dequantize

CHUNK = 128  # ids fetched and decoded at a time: one lane each
TILE = 32  # rows in a tile of bytes
LANES, SUBLANES = 128, 8
ZERO = np.int32(0)  # a bare 0 in an index map is 64 bits wide under x64, which Mosaic cannot lower
PICK = 16  # window rows picked in one loop body: a tile of bfloat16
RAGGED_ENTRIES = 2**14  # entries that may be padded, which copies them
WINDOW_ROWS = 2**13  # held on chip, twice: 16 MiB at H = 512
LIST = 2**12  # ids of one query
VMEM_BYTES = 48 * 2**20


def gather_attention(
    query_BTNH, sink_N, window, window_index_BTW, entries, entry_index_BTK, *, scale, window_format, entry_format
):
    """See the contract."""
    if entries is not None and entry_index_BTK.shape[2] == 0:
        entries = None
    _refuse(query_BTNH, window, window_index_BTW, entries, entry_index_BTK, window_format, entry_format)
    B, T, N, H = query_BTNH.shape
    dtype = query_BTNH.dtype
    rows = _pair(dequantize(*window, format=window_format, dtype=jnp.bfloat16))
    window_ids = _whole_chunks(window_index_BTW, window[0])
    ids, L, P = window_ids, window_ids.shape[2], rows.shape[1]

    def each_query(*shape, **where):
        return pl.BlockSpec((1, 1, *shape), lambda b, t: (b, t, ZERO, ZERO), **where)

    arrays, specs, scratch = [], [], []
    if entries is not None:
        entry_ids = _whole_chunks(entry_index_BTK, entries[0])
        ids, K = jnp.concatenate([ids, entry_ids], axis=2), entry_ids.shape[2]
        next_ids = jnp.pad(jnp.maximum(entry_ids, 0).reshape(-1)[CHUNK:], (0, CHUNK)).reshape(B, T, 1, K)
        codes, scales = (_pad(plane, 1, LANES, 0) for plane in entries)
        codes = codes.reshape(B, -1, TILE, H // 2)
        arrays = [next_ids, _even_channels_first(H, dtype), codes, jnp.swapaxes(scales, 1, 2)]
        specs = [each_query(1, K, memory_space=pltpu.SMEM), pl.BlockSpec((H, H), lambda b, t: (ZERO, ZERO))]
        specs += [pl.BlockSpec(memory_space=pl.ANY)] * 2
        scratch = [
            pltpu.VMEM((K, H), dtype),
            pltpu.VMEM((CHUNK, H // 2), jnp.int32),
            pltpu.VMEM((2, CHUNK, TILE, H // 2), jnp.uint8),
            pltpu.VMEM((2, CHUNK, H // 16, LANES), jnp.uint8),
            pltpu.SemaphoreType.DMA((2,)),
        ]
    ids = ids[:, :, None]
    return pl.pallas_call(
        functools.partial(_kernel, scale=scale, scratch=len(scratch)),
        out_shape=jax.ShapeDtypeStruct((B, T, N, H), dtype),
        grid=(B, T),
        in_specs=[
            each_query(1, ids.shape[-1], memory_space=pltpu.SMEM),
            each_query(1, ids.shape[-1]),
            each_query(N, H),
            pl.BlockSpec((N, 1), lambda b, t: (ZERO, ZERO)),
            pl.BlockSpec((1, P, H), lambda b, t: (b, ZERO, ZERO)),
            *specs,
        ],
        out_specs=each_query(N, H),
        scratch_shapes=[pltpu.VMEM((L, H), dtype), *scratch],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_BYTES, disable_bounds_checks=True
        ),
        name="gather_attention",
    )(ids, ids, query_BTNH, sink_N.astype(jnp.float32)[:, None], rows, *arrays)


def _refuse(query, window, window_index, entries, entry_index, window_format, entry_format):
    B, T, N, H = query.shape
    if B * T == 0:
        raise NotImplementedError(f"no query: {B} sequences of {T}")
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        raise NotImplementedError(f"the query is {query.dtype}, not bfloat16 or float32")
    if H % 512 or N % 8:
        raise NotImplementedError(f"{N} heads of {H} channels are not whole tiles: 8 heads, 512 channels")
    if window_format != "fp8_e8m0_32" or (entries is not None and entry_format != "fp4_e4m3_16"):
        raise NotImplementedError(f"formats are {window_format} and {entry_format}, not fp8_e8m0_32 and fp4_e4m3_16")
    if window[0].shape[1] > WINDOW_ROWS:
        raise NotImplementedError(f"{window[0].shape[1]} window rows, of which {WINDOW_ROWS} fit on chip")
    ids = window_index.shape[2] + (0 if entries is None else entry_index.shape[2])
    if ids > LIST:
        raise NotImplementedError(f"a query lists {ids} rows, of which {LIST} fit on chip")
    if entries is not None and entries[0].shape[1] % LANES and entries[0].shape[1] > RAGGED_ENTRIES:
        raise NotImplementedError(f"{entries[0].shape[1]} entries are not whole tiles of {LANES}")


def _whole_chunks(index, plane):
    """Fills an index up with -1, and clips it as the reference does: a copy from outside of a plane would be fatal."""
    return _pad(jnp.minimum(index, jnp.int32(plane.shape[1] - 1)), 2, CHUNK, -1)


def _pad(a, axis, multiple, value):
    """Fills `axis` up with `value`."""
    edges = [(0, -n % multiple if i == axis else 0) for i, n in enumerate(a.shape)]
    return jnp.pad(a, edges, constant_values=value)


def _pair(rows):
    """Packs bf16 rows [B, P, H] into i32 [B, ceil(P / 2), H], the first half of the rows low."""
    rows = lax.bitcast_convert_type(_pad(rows, 1, 2, 0), jnp.uint16).astype(jnp.uint32)
    low, high = jnp.split(rows, 2, axis=1)
    return lax.bitcast_convert_type(low | high << 16, jnp.int32)


def _even_channels_first(H, dtype):
    """The permutation matrix [H, H] that reorders channels so; its transpose puts them back."""
    order = np.concatenate([np.arange(0, H, 2), np.arange(1, H, 2)])
    return jnp.asarray(np.arange(H)[:, None] == order, dtype)


def _loop(count, body, carry=None):
    """A loop whose counter is an i32 whatever x64 says."""
    return lax.fori_loop(jnp.int32(0), jnp.int32(count), body, carry)


def _dot(a, b, axes):
    """A product in float32 over the given axes; float32 operands are not rounded."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, ((axes[:1], axes[1:]), ((), ())), precision, jnp.float32)


def _kernel(ids_ref, lane_ids_ref, query_ref, sink_ref, window_ref, *refs, scale, scratch):
    """Attends one query; `refs` hold what entries need, if any, around the output and the window's rows."""
    inputs, (out_ref, rows_ref), buffers = refs[: -2 - scratch], refs[-2 - scratch :][:2], refs[len(refs) - scratch :]
    query, sink = query_ref[0, 0], sink_ref[...]
    _pick_window(ids_ref, window_ref, rows_ref)
    scores = _dot(query, rows_ref[...], (1, 1))
    if inputs:
        next_ids_ref, order_ref, codes_ref, scales_ref = inputs
        entries_ref, *buffers = buffers
        _read_entries(ids_ref, lane_ids_ref, next_ids_ref, codes_ref, scales_ref, entries_ref, *buffers)
        query = _dot(query, order_ref[...], (1, 0)).astype(query.dtype)
        scores = jnp.concatenate([scores, _dot(query, entries_ref[...], (1, 1))], axis=1)

    scores = jnp.where(lane_ids_ref[0, 0] >= 0, scores * jnp.float32(scale), -jnp.inf)
    top = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), sink)  # finite, so no -inf - -inf
    weights = jnp.exp(scores - top)
    weights /= jnp.sum(weights, axis=1, keepdims=True) + jnp.exp(sink - top)
    weights = weights.astype(query.dtype)
    width = rows_ref.shape[0]
    out = _dot(weights[:, :width], rows_ref[...], (1, 0))
    if inputs:
        reordered = _dot(weights[:, width:], entries_ref[...], (1, 0))
        high = reordered.astype(query.dtype)
        low = (reordered - high.astype(jnp.float32)).astype(query.dtype)  # so that nothing is rounded twice
        out += _dot(high, order_ref[...], (1, 1)) + _dot(low, order_ref[...], (1, 1))
    out_ref[0, 0] = out.astype(out_ref.dtype)


def _pick_window(ids_ref, window_ref, rows_ref):
    """Copies the query's window rows, zeros where there is none."""
    half = window_ref.shape[1]

    def pick(step, _):
        rows = []
        for i in range(PICK):
            row = ids_ref[0, 0, 0, step * PICK + i]
            high = (row >= half).astype(jnp.int32)
            words = window_ref[0, pl.ds(jnp.maximum(row - high * half, 0), 1), :]
            rows.append(jnp.where(row >= 0, words >> (high << 4) << 16, 0))
        rows = lax.bitcast_convert_type(jnp.concatenate(rows, axis=0), jnp.float32)
        rows_ref[pl.ds(pl.multiple_of(step * PICK, PICK), PICK), :] = rows.astype(rows_ref.dtype)

    _loop(rows_ref.shape[0] // PICK, pick)


def _read_entries(
    ids_ref, lane_ids_ref, next_ids_ref, codes_ref, scales_ref, rows_ref, words_ref, codes_tiles, scales_tiles, arrived
):
    """Decodes the query's entries chunk by chunk, while the tiles of the next chunk arrive, be it the next query's."""
    b, t, T = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
    chunks = next_ids_ref.shape[-1] // CHUNK
    first = ids_ref.shape[-1] - chunks * CHUNK  # behind the window's
    groups, half = scales_ref.shape[1], codes_ref.shape[3]
    sublanes = lax.broadcasted_iota(jnp.int32, (SUBLANES, half), 0)
    lanes = lax.broadcasted_iota(jnp.int32, (groups // 4, LANES), 1)

    def fetch(sequence, entry, slot, i):
        lane = pl.multiple_of(entry & -LANES, LANES)
        codes, scales = codes_ref.at[sequence, entry >> 5], scales_ref.at[sequence, :, pl.ds(lane, LANES)]
        pltpu.make_async_copy(codes, codes_tiles.at[slot, i], arrived.at[slot]).start()
        pltpu.make_async_copy(scales, scales_tiles.at[slot, i], arrived.at[slot]).start()

    def wait(slot):
        for tiles in (codes_tiles, scales_tiles):
            pltpu.make_async_copy(tiles.at[slot], tiles.at[slot], arrived.at[slot]).wait()

    @pl.when((b == 0) & (t == 0))
    def _():
        _loop(CHUNK, lambda i, _: fetch(b, jnp.maximum(ids_ref[0, 0, 0, first + i], 0), jnp.int32(0), i))

    last_query = jnp.where(t + 1 < T, b, jnp.minimum(b + 1, pl.num_programs(0) - 1))

    def chunk(c, _):
        slot = ((b * T + t) * chunks + c) & 1
        next_sequence = jnp.where(c + 1 < chunks, b, last_query)
        wait(slot)

        def pick(step, scales):
            words = jnp.zeros((SUBLANES, half), jnp.int32)
            for k in range(SUBLANES):
                i = step * SUBLANES + k
                fetch(next_sequence, next_ids_ref[0, 0, 0, c * CHUNK + i], 1 - slot, i)
                entry = ids_ref[0, 0, 0, first + c * CHUNK + i]
                # Four rows of bytes are a row of words; rolled, the entry's word and lane come to where it belongs.
                tile = pltpu.roll(pltpu.bitcast(codes_tiles[slot, i], jnp.int32), (k - (entry >> 2)) & 7, 0)
                words = jnp.where(sublanes == k, tile, words)
                tile = pltpu.roll(pltpu.bitcast(scales_tiles[slot, i], jnp.int32), (i - entry) & (LANES - 1), 1)
                scales = jnp.where(lanes == i, tile, scales)
            words_ref[pl.ds(pl.multiple_of(step * SUBLANES, SUBLANES), SUBLANES), :] = words
            return scales

        scales = _loop(CHUNK // SUBLANES, pick, jnp.zeros((groups // 4, LANES), jnp.int32))
        ids = lane_ids_ref[0, 0, :, pl.ds(pl.multiple_of(first + c * CHUNK, CHUNK), CHUNK)]
        scales = _spread(jnp.where(ids >= 0, scales, 0), half)  # codes are finite: 0 is left where there is no entry
        words = words_ref[...] >> ((_column(ids) & 3) << 3)
        halves = [bits.decode_e2m1(codes & 15) * scales for codes in (words, words >> 4)]
        rows = jnp.concatenate(halves, axis=1).astype(rows_ref.dtype)
        rows_ref[pl.ds(pl.multiple_of(c * CHUNK, CHUNK), CHUNK), :] = rows

    _loop(chunks, chunk)

    @pl.when((b + 1 == pl.num_programs(0)) & (t + 1 == T))
    def _():
        wait(((b + 1) * T * chunks) & 1)


def _column(row):
    """Turns [1, n] into [n, 1]."""
    shape = (row.shape[1], row.shape[1])
    diagonal = lax.broadcasted_iota(jnp.int32, shape, 0) == lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.sum(jnp.where(diagonal, row, 0), axis=1, keepdims=True, dtype=jnp.int32)


def _spread(words, half):
    """Decodes scales, four groups a word and an entry a lane, to f32 [entries, half], a column a byte of codes."""
    groups = 4 * words.shape[0]
    scales = jnp.concatenate([bits.decode_e4m3((words >> 8 * k & 255).astype(jnp.uint8)) for k in range(4)], axis=0)
    row = lax.broadcasted_iota(jnp.int32, (groups, half), 0)
    byte = lax.div(row, jnp.int32(groups // 4))
    group = (row - byte * (groups // 4)) * 4 + byte
    here = group == lax.broadcasted_iota(jnp.int32, (groups, half), 1) >> 3
    return _dot(scales.astype(jnp.bfloat16), here.astype(jnp.float32).astype(jnp.bfloat16), (0, 0))
