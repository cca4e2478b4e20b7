"""Lightning-indexer scores on TPU: each tile of packed keys is read and dequantised once for all queries of a tile.

The grid runs over sequences, query tiles and key tiles. Keys come as [J / 2, keys] and [G, keys], keys on lanes, which
is how XLA stores both planes on TPU, so no copy is made. Key tiles past the last entry that a query tile sees are not
fetched: the index map stays at the last useful tile, and their result is filled with -inf.
A tile is worked off in groups of columns (keys). Four channels of a 32-bit word turn into two pairs of bfloat16 at a
time, times their scale; the channels so come out in another order, in which the queries are laid out too. One matmul
gives the dots of all heads and queries, [rows, columns] in float32; then ReLU, weights, and the sum over heads:
from 8 queries on, rows are head by head and the sum adds whole registers; below, query by query, so that no row of the
matmul is padding.
Block maxima: three rolls of the lanes (for blocks of 8) leave each block's maximum in its first lane, eight registers
merge into one, and swaps of lane-number bits put its 128 maxima in order. No arithmetic touches them.

Bytes: 68 a visible key and query tile in, 4 / block_size a key and query out. FLOP: 8192 a visible key and query.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import E8M0_NAN

LANES, SUBLANES = 128, 8
FORMAT, GROUP = "fp4_e8m0_32", 32
TUNING = {  # all generations; queries and keys in a tile, keys in a group of columns, heads in a matmul
    "few queries": {"queries": 7, "keys": 16384, "columns": 512, "heads": None},
    "many queries": {"queries": 128, "keys": 2048, "columns": 256, "heads": 4},
}


def index_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, *, format, block_size: int):
    """See the contract. Serves keys in fp4_e8m0_32 and blocks of 1, 2, 4, 8 or 16 entries."""
    refuse(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, format=format)
    B, T, heads, J = query_BTIJ.shape
    S = codes_BSJ.shape[1]
    few = T < SUBLANES
    tuning = TUNING["few queries" if few else "many queries"]
    if block_size < 1 or tuning["keys"] % (LANES * block_size) or LANES % block_size or block_size > 16:
        raise NotImplementedError(f"blocks of 1, 2, 4, 8 or 16 entries, not {block_size}")
    blocks = -(-S // block_size)
    if 0 in (B, T, S):
        return jnp.full((B, T, blocks), -jnp.inf, jnp.float32)

    tiles = 1 if few else -(-T // tuning["queries"])
    queries = T if few else -(-T // (tiles * SUBLANES)) * SUBLANES  # in a tile
    edge = [(0, 0), (0, tiles * queries - T), (0, 0)]
    weight, visible = jnp.pad(carry_nan(query_BTIJ, weight_BTI), edge), jnp.minimum(visible_BT, S)[..., None]
    query = order_channels(jnp.pad(query_BTIJ, [*edge, (0, 0)])).reshape(B, tiles, queries, heads, J)
    query = (query if few else jnp.swapaxes(query, 2, 3)).reshape(B, tiles, queries * heads, J)
    weight = weight.reshape(B, T * heads, 1) if few else weight
    visible = jnp.pad(visible, edge)
    last = visible.reshape(B, tiles, queries).max(-1)

    columns = tuning["columns"]
    step = max(columns, LANES * block_size)
    whole = min(tuning["keys"], -(-S // step) * step)  # keys in a tile

    def keys_of(b, t, k, last):
        return b, jnp.int32(0), jnp.minimum(k, lax.div(jnp.maximum(last[b, t] - 1, 0), jnp.int32(whole)))

    def queries_of(b, t, k, last):
        return b, t, jnp.int32(0)

    def rows_of(b, t, k, last):
        return b, t, jnp.int32(0), jnp.int32(0)

    score = functools.partial(_kernel, heads=heads, block_size=block_size, columns=columns, group=tuning["heads"])
    return pl.pallas_call(
        score,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(B, tiles, -(-S // whole)),
            in_specs=[
                pl.BlockSpec((None, None, queries * heads, J), rows_of),
                pl.BlockSpec((None, *((queries * heads, 1) if few else (queries, heads))), queries_of),
                pl.BlockSpec((None, queries, 1), queries_of),
                pl.BlockSpec((None, J // 2, whole), keys_of),
                pl.BlockSpec((None, J // GROUP, whole), keys_of),
            ],
            out_specs=pl.BlockSpec((None, queries, whole // block_size), lambda b, t, k, last: (b, t, k)),
            scratch_shapes=[] if block_size == 1 else [pltpu.VMEM((queries, whole), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((B, T, blocks), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        name="index_scores",
    )(last, query, weight, visible, jnp.swapaxes(codes_BSJ, 1, 2), jnp.swapaxes(scales_BSG, 1, 2))


def refuse(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, *, format):
    """Raises NotImplementedError for keys, queries or widths that the kernels over packed keys cannot serve."""
    heads, J = query_BTIJ.shape[2:]
    if format != FORMAT:
        raise NotImplementedError(f"keys in {FORMAT} only, not {format}")
    if codes_BSJ.dtype != jnp.uint8 or scales_BSG.dtype != jnp.uint8:
        raise NotImplementedError(f"uint8 planes, not {codes_BSJ.dtype} and {scales_BSG.dtype}")
    if query_BTIJ.dtype not in (jnp.bfloat16, jnp.float32) or weight_BTI.dtype != jnp.float32:
        raise NotImplementedError(f"bf16 or f32 queries and f32 weights, not {query_BTIJ.dtype}, {weight_BTI.dtype}")
    if J % 64 or codes_BSJ.shape[2] != J // 2 or scales_BSG.shape[2] != J // GROUP:
        raise NotImplementedError(f"channels in multiples of 64, codes and scales to match, not {J}")
    if heads % SUBLANES or heads > LANES:
        raise NotImplementedError(f"a multiple of {SUBLANES} heads, {LANES} at most, not {heads}")


def order_channels(query):
    """Lays channels [..., J] out as `dequantize` does: 8 r + 4 h + n becomes n J / 4 + 2 r + h; bfloat16."""
    *lead, J = query.shape
    words = query.astype(jnp.bfloat16).reshape(*lead, J // 8, 2, 4)  # of 8 channels; halves; nibbles of a half
    return jnp.moveaxis(words, -1, -3).reshape(*lead, J)


def dequantize(words, byte):
    """Decodes words of 4 code bytes [J / 8, keys] and scale bytes [G, keys], both i32, to bf16 [J, keys]; exact."""
    scale = jnp.where(byte == E8M0_NAN, jnp.int32(0x7FC0), jnp.where(byte == 0, jnp.int32(0x40), byte << 7))
    scale = scale | scale << 16
    rows, keys = words.shape[0] // scale.shape[0], words.shape[1]
    scale = jnp.concatenate([jnp.broadcast_to(scale[g : g + 1], (rows, keys)) for g in range(scale.shape[0])])
    scale = pltpu.bitcast(scale, jnp.bfloat16)

    def decode(nibbles):
        # Bits in the place of a bfloat16's exponent and top mantissa bit are right from 1 on; 0.5 and 0 come as 0.75
        # and 0.5, which 2 x - 1 mends. A shift alone would make 0.5 subnormal, and the chip reads that as 0.
        size = (nibbles & jnp.int32(0x00070007)) << 6
        size = pltpu.bitcast(size + jnp.int32(0x3F003F00), jnp.bfloat16)
        size = jnp.minimum(size, size + size - jnp.bfloat16(1))
        sign = (nibbles & jnp.int32(0x00080008)) << 12
        return pltpu.bitcast(pltpu.bitcast(size, jnp.int32) | sign, jnp.bfloat16) * scale

    return jnp.concatenate([decode(words >> jnp.int32(4 * n)) for n in range(4)])


def carry_nan(query_BTIJ, weight_BTI):
    """The weights, NaN where the query has a NaN.

    A compiler may read max(NaN, 0) as 0, so NaN is looked for where it enters: queries, weights and scales.
    """
    return jnp.where(jnp.isnan(query_BTIJ).any(-1), jnp.float32(jnp.nan), weight_BTI)


def dot_relu(query, keys):
    """Dots [rows, keys] of bf16 queries [rows, J] and keys [J, keys], in float32, negative ones 0."""
    dots = lax.dot_general(query, keys, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    return jnp.maximum(dots, jnp.float32(0))


def _kernel(last, query, weight, visible, codes, scales, out, *scratch, heads, block_size, columns, group):
    """Scores one tile of keys for one tile of queries."""
    scores = scratch[0] if scratch else out
    queries, whole = scores.shape
    first = pl.program_id(2) * jnp.int32(whole)
    lane = lax.broadcasted_iota(jnp.int32, (queries, columns), 1)
    seen = last[pl.program_id(0), pl.program_id(1)] - first
    stop = lax.div(jnp.clip(seen, 0, whole) + jnp.int32(columns - 1), jnp.int32(columns))

    def place(i, width=columns):
        return pl.ds(pl.multiple_of(i * jnp.int32(width), width), width)

    def score(i, _):
        byte = scales[:, place(i)].astype(jnp.int32)
        keys = dequantize(pltpu.bitcast(codes[:, place(i)], jnp.int32), byte)
        if group is None:
            products = dot_relu(query[...], keys) * weight[...]
            total = jnp.sum(products.reshape(queries, heads, columns), axis=1)
        else:
            total = jnp.zeros((queries, columns), jnp.float32)
            for head in range(0, heads, group):
                rows = min(group, heads - head) * queries
                dots = dot_relu(query[pl.ds(head * queries, rows)], keys)
                for n in range(rows // queries):
                    total += dots[n * queries : (n + 1) * queries] * weight[:, head + n : head + n + 1]
        seen = (first + i * jnp.int32(columns) + lane < visible[...]) & (total == total)
        seen &= jnp.max(byte, axis=0, keepdims=True) < E8M0_NAN
        scores[:, place(i)] = jnp.where(seen, total, -jnp.inf)

    def clear(i, _):
        scores[:, place(i)] = jnp.full((queries, columns), -jnp.inf, jnp.float32)

    lax.fori_loop(jnp.int32(0), stop, score, None)
    lax.fori_loop(stop, jnp.int32(whole // columns), clear, None)

    def reduce(i, _):
        part = scores[:, place(i, LANES * block_size)]
        out[:, place(i, LANES)] = _block_max([part[:, n * LANES : (n + 1) * LANES] for n in range(block_size)])

    if block_size > 1:
        lax.fori_loop(jnp.int32(0), jnp.int32(whole // (LANES * block_size)), reduce, None)


def _block_max(parts):
    """Maxima of blocks of n adjacent lanes in n parts [rows, 128] as one [rows, 128]; n a power of two."""
    block_size = len(parts)
    bits, low = LANES.bit_length() - 1, block_size.bit_length() - 1
    lane = lax.broadcasted_iota(jnp.int32, parts[0].shape, 1)
    merged = parts[0]
    for n, part in enumerate(parts):
        for step in range(low):
            part = jnp.maximum(part, _roll(part, LANES - 2**step))
        slot = sum((n >> bit & 1) << (low - 1 - bit) for bit in range(low))  # n, its bits reversed
        merged = part if n == 0 else jnp.where(lane & (block_size - 1) == slot, _roll(part, slot), merged)

    # Block m of part n stands in lane m block_size + reversed n; reversing all bits of the lane's number, then those
    # of m, moves it to lane n (128 / block_size) + m.
    for width in (bits, bits - low):
        for i in range(width // 2):
            merged = _swap_bits(merged, lane, i, width - 1 - i)
    return merged


def _swap_bits(x, lane, low: int, high: int):
    """Moves every lane to the lane whose number has the two bits swapped."""
    is_low, is_high, step = lane >> low & 1, lane >> high & 1, 2**high - 2**low
    x_up, x_down = _roll(x, step), _roll(x, LANES - step)
    return jnp.where(is_low == is_high, x, jnp.where(is_high == 1, x_up, x_down))


def _roll(x, lanes: int):
    """Rotates the lanes; a bare integer is 64 bits wide under x64, which Mosaic cannot lower."""
    return pltpu.roll(x, jnp.int32(lanes), axis=1)
