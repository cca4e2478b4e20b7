"""Pool scores on Hopper: the index-score kernel, walking over the places of each query's pool instead of all keys.

A row is one query, its work the ceil(C * block_size / 64) tiles of 64 places; rows laid end to end are cut into one
equal range for each multiprocessor, so one query spreads over all of them. A thread finds the key of a place with one
load of the block's id and copies that key's 64 + 4 bytes as `index_scores` does: 8 neighbouring keys are 512
contiguous bytes, wherever the block lies, so the time does not depend on the length of the context. Places of no
block, past S or invisible read some key in bounds and become -inf.

Cost: 68 bytes and 8192 FLOP a place: 1.1 MB and 0.3 us at 4.3 TB/s for a pool of 16384 entries and one query.
"""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels.index_scores import mosaic_gpu as scores
from pallas_kernels.index_scores.hopper_tile import ROWS, SCALAR, TILE, fragment, per_thread, scalar, wide
from pallas_kernels.ptx import add, address, asm, const, int_type


def pool_scores(query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, block_BTC, visible_BT, *, format, block_size: int):
    """See the contract."""
    (B, T, C), S = block_BTC.shape, codes_BSJ.shape[1]
    scores.check(query_BTIJ, codes_BSJ, format)
    width, tiles = C * block_size, -(-C * block_size // TILE)
    if B * T * width * S == 0:
        return jnp.full((B, T, width), -jnp.inf, jnp.float32)
    if B * T * tiles >= 2**31 or S + block_size >= 2**31:
        raise NotImplementedError(f"{B} x {T} queries of {tiles} tiles of {TILE} places, {S} keys: one passes 2^31")
    out_QP = scores.score_rows(
        query_BTIJ, weight_BTI, codes_BSJ, scales_BSG, visible_BT, block_BTC.reshape(B * T, C), width,
        keys_at=lambda block_QC, row, place: _keys_at(block_QC, row, place, block_size, -(-S // block_size)),
        row_of=lambda _, tile: scores.div(tile, tiles), first_of=lambda _, row: jnp.int32(row * tiles), fill=None,
        rows=T, row=1, step=1, block_size=1,
    )  # fmt: skip
    return out_QP.reshape(B, T, width)


def _keys_at(block_QC, query, place, block_size, blocks):
    """The key at each place of a query's pool; what has none gets one past S."""
    C = block_QC.shape[1]
    result = plgpu.ShapeDtypeStruct((TILE,), jnp.int32, layout=ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, ROWS), return_type=result)
    def find(_, block_QC, query, place):
        row = arith.muli(wide(scalar(query)), const(C, 64))
        keys = []
        for one in per_thread(place):
            inside = arith.minsi(arith.divui(one, const(block_size)), const(C - 1))
            at = add(address(block_QC), arith.muli(add(row, wide(inside)), const(4, 64)))
            [block] = asm("ld.global.nc.b32 $0, [$1];", "r", at, pure=True)
            block = arith.minui(block, const(blocks))  # -1 is the largest unsigned: past S
            keys.append(add(arith.muli(block, const(block_size)), arith.remui(one, const(block_size))))
        return fragment(keys, (TILE,), ROWS, int_type(), signed=True)

    return find(block_QC, query, place)
