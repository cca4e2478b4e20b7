"""What the lanes of a quad do with their parts of the scores of 64 index keys: add, mask, take maxima, store."""

import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.index_scores.hopper_tile import ROWS, SCALAR, fragment, lanes, per_thread, scalar, threads, wide
from pallas_kernels.ptx import add, address, asm, const, int_type


def _item(items):
    """Which of the two or four items of `store_scores` this lane is left with."""
    quad = lanes()[2]
    return quad if items == 4 else arith.shrui(quad, const(1))


def load_visible(visible_Q, first_query, queries, step, keys):
    """How many keys the query sees that this lane stores scores of."""
    layout = threads(1)
    result = plgpu.ShapeDtypeStruct((128,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR), return_type=result)
    def load(_, visible_Q, first_query, queries):
        query = const(0) if step == 1 else arith.minsi(_item(step), add(scalar(queries), const(-1)))
        query = add(scalar(first_query), query)
        at = add(address(visible_Q), arith.muli(wide(query), const(4, 64)))
        [visible] = asm("ld.global.nc.b32 $0, [$1];", "r", at, pure=True)
        return fragment([arith.minsi(visible, const(keys))], result.shape, layout, int_type(), signed=True)

    return load(visible_Q, first_query, queries)


def store_scores(totals, out_QM, visible, first_query, items, places, keys, *, step, block_size):
    """Sums over the lanes of a quad, masks, takes the maximum over block_size keys and stores.

    Args:
      totals: of `weigh`, for each tile: one or two tiles of one query, or one of two or four queries.
      visible: of `load_visible`.
      items: how many of the tiles, or of the queries, there are.
      places, keys: for each tile.
    """
    tiles = len(totals)

    def exchange(pairs, distance):
        """Adds across lanes that differ in one bit; of two values, a lane keeps the one its bit names."""
        bit = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lanes()[1], const(distance)), const(0))
        kept = []
        for low, high in pairs:
            mine, other = arith.select(bit, high, low), arith.select(bit, low, high)
            kept.append(arith.addf(mine, utils.shfl_bfly(other, distance)))
        return kept

    @plgpu.inline_mgpu(
        arg_types=(*[threads(2 * step)] * tiles, plgpu.RefType(), threads(1), SCALAR, SCALAR, *[ROWS] * (2 * tiles))
    )
    def store(_, *arguments):
        totals, arguments = arguments[:tiles], arguments[tiles:]
        out_QM, visible, first_query, items, *rows = arguments
        width = ir.MemRefType(out_QM.type).shape[1]
        totals = [pair for total in totals for pair in zip(*[iter(per_thread(total))] * 2, strict=True)]  # [item][half]
        item, lane = _item(len(totals)), lanes()[1]
        odd, upper = (arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lane, const(bit)), const(0)) for bit in (1, 2))
        places, keys = (list(map(per_thread, rows[i : i + tiles])) for i in (0, tiles))  # [tile][half]
        if len(totals) == 4:
            low, high = (exchange(list(zip(*totals[i : i + 2], strict=True)), 1) for i in (0, 2))
            values = exchange(list(zip(low, high, strict=True)), 2)
            marks = list(zip(*places, *keys, strict=True))
        else:
            values = exchange(totals, 1)
            if len(values) == 2:
                values = exchange([tuple(values)], 2)
            else:
                values = [arith.addf(value, utils.shfl_bfly(value, 2)) for value in values]
            marks = [[arith.select(odd, high, low) for low, high in pairs] for pairs in (places, keys)]
            marks = [[pair[0] if tiles == 1 else arith.select(upper, *reversed(pair)) for pair in marks]]

        query = scalar(first_query) if step == 1 else add(scalar(first_query), item)
        stores = arith.cmpi(arith.CmpIPredicate.slt, item, scalar(items))
        in_block = arith.andi(arith.shrui(lane, const(2)), const(block_size - 1))
        stores = arith.andi(stores, arith.cmpi(arith.CmpIPredicate.eq, in_block, const(0)))
        [visible] = per_thread(visible)
        for value, (place, key) in zip(values, marks, strict=True):
            seen = arith.cmpi(arith.CmpIPredicate.slt, key, visible)
            value = arith.select(seen, value, utils.c(-float("inf"), ir.F32Type.get()))
            [value] = asm("max.f32 $0, $1, 0fFF800000;", "f", value, pure=True)  # NaN loses
            for bit in range(block_size.bit_length() - 1):
                other = utils.shfl_bfly(value, 4 << bit)
                [value] = asm("max.f32 $0, $1, $2;", "f", value, other, pure=True)
            index = arith.shrui(place, const(block_size.bit_length() - 1))
            inside = arith.cmpi(arith.CmpIPredicate.slt, index, const(width))
            _store(out_QM, query, index, value, arith.andi(stores, inside))

    store(*totals, out_QM, visible, first_query, items, *places, *keys)


def _store(out_QM, query, index, value, when):
    """Stores one float of the result where `when` holds."""
    width = ir.MemRefType(out_QM.type).shape[1]
    at = add(arith.muli(wide(query), const(width, 64)), wide(index))
    at = add(address(out_QM), arith.muli(at, const(4, 64)))
    when = arith.extui(int_type(), when)
    asm(".reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1;", "", at, value, when)


def store_minus_inf(out_QM, query, begin, unscored, chunk):
    """Stores -inf in a chunk's results from `unscored` on."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR, SCALAR))
    def store(_, out_QM, query, begin, unscored):
        width = ir.MemRefType(out_QM.type).shape[1]
        thread = arith.andi(utils.thread_idx(), const(127))
        for first in range(0, chunk, 128):
            index = add(scalar(begin), const(first), thread)
            inside = arith.cmpi(arith.CmpIPredicate.slt, index, const(width))
            inside = arith.andi(inside, arith.cmpi(arith.CmpIPredicate.sge, index, scalar(unscored)))
            _store(out_QM, scalar(query), index, utils.c(-float("inf"), ir.F32Type.get()), inside)

    store(out_QM, query, begin, unscored)
