"""What one thread does with its part of a tile of 64 index keys: copy, expand, weigh and reduce, store.

Thread g of a quad owns the 16 bytes of scale group g of two keys, r and r + 8 of the 16 that its warp holds.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import FragmentedArray, utils
from jax.experimental.mosaic.gpu.utils import llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels.formats import E8M0_NAN
from pallas_kernels.ptx import add, address, asm, const, int_type

HEADS, CHANNELS, GROUP = 32, 128, 32
TILE = 64  # keys of one wgmma

ROWS = plgpu.Layout.WGMMA.reduce(1)  # one value for each of 64 keys: a thread holds keys r and r + 8
SCALAR = plgpu.Layout.WG_SPLAT(())


def wide(value):
    """Widens an index before it is multiplied into an address."""
    return arith.extui(int_type(64), value)


def lanes():
    """This thread's warp in the warpgroup, its lane, and its place in the quad."""
    thread = utils.thread_idx()
    lane = arith.andi(thread, const(31))
    return arith.andi(arith.shrui(thread, const(5)), const(3)), lane, arith.andi(lane, const(3))


def own(slot, half):
    """Index of this thread's part of a slot, for its key r (half 0) or r + 8 (half 1)."""
    warp, lane, _ = lanes()
    return add(arith.muli(scalar(slot), const(256)), arith.muli(warp, const(64)), const(32 * half), lane)


def scalar(array):
    """The value of a scalar argument."""
    return array.registers.item()


def per_thread(array):
    """The registers of one thread, as plain values."""
    [width] = ir.VectorType(array.registers.flat[0].type).shape
    return [llvm.extractelement(register, const(n)) for register in array.registers.flat for n in range(width)]


def fragment(values, shape, layout, dtype, signed=None):
    """An array in `layout` from the 32-bit registers of one thread."""
    layout = layout.to_mgpu()
    register = ir.VectorType.get((layout.vector_length,), dtype)
    registers = np.empty(len(values), dtype=object)
    registers[:] = [llvm.bitcast(register, value) for value in values]
    return FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=signed
    )


def copy_keys(codes_BSJ, scales_BSG, codes_smem, scales_smem, slot, sequence, key):
    """Starts the copies of the 16 code bytes and the 4 scale bytes of this thread's two keys."""
    keys = codes_BSJ.shape[1]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * 4, SCALAR, SCALAR, ROWS))
    def copy(_, codes_BSJ, scales_BSG, codes_smem, scales_smem, slot, sequence, key):
        first = arith.muli(wide(scalar(sequence)), const(keys, 64))
        planes = (codes_BSJ, codes_smem, CHANNELS // 2, GROUP // 2), (scales_BSG, scales_smem, CHANNELS // GROUP, 0)
        for plane, smem, key_bytes, group_bytes in planes:
            # What does not change from tile to tile is summed first, so that it leaves the loop.
            source = add(address(plane), arith.muli(first, const(key_bytes, 64)))
            source = add(source, wide(arith.muli(lanes()[2], const(group_bytes))))
            for half, one in enumerate(per_thread(key)):
                one = arith.minsi(one, const(keys - 1))  # what is not a key is read in bounds, then masked
                bytes_ = group_bytes or key_bytes
                target = add(address(smem), arith.muli(own(slot, half), const(bytes_)))
                kind = "cg" if bytes_ == 16 else "ca"
                at = add(source, arith.muli(wide(one), const(key_bytes, 64)))
                asm(f"cp.async.{kind}.shared.global [$0], [$1], {bytes_};", "", target, at)

    copy(codes_BSJ, scales_BSG, codes_smem, scales_smem, slot, sequence, key)


def commit_copies():
    """Closes a group of copies, empty or not, so that groups count tiles."""

    @plgpu.inline_mgpu()
    def commit(_):
        asm("cp.async.commit_group;", "")

    commit()


def _expand_word(word):
    """Nibbles n and n + 4 of a word as two bfloat16 in register n: their values times 2^-126."""
    shifted, pairs = arith.shrui(word, const(8)), []
    for source, low in ((word, 0), (word, 4), (shifted, 0), (shifted, 4)):
        # The multiplication, which the idle FMA units do, puts the sign at bit 15 and the rest at bits 6 to 8, the
        # bottom of the exponent.
        twice = arith.muli(arith.andi(source, const(0x000F000F << low)), const((1 << 12 | 1 << 6) >> low))
        pairs.append(arith.andi(twice, const(0x81C081C0)))
    return pairs


def _scale(words, pair):
    """Multiplies registers of two bfloat16."""
    return [asm("mul.rn.bf16x2 $0, $1, $2;", "r", word, pair, pure=True)[0] for word in words]


def expand(codes_smem, scales_smem, slot, stages):
    """Waits for a slot and returns its keys / 2^5, bf16 [TILE, CHANNELS], channels as in the permuted queries."""
    layout = plgpu.Layout.WGMMA
    result = plgpu.ShapeDtypeStruct((TILE, CHANNELS), jnp.bfloat16, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR), return_type=result)
    def decode(_, codes_smem, scales_smem, slot):
        i32 = int_type()
        asm(f"cp.async.wait_group {stages - 1};", "")
        halves, large, seconds = [], [], []
        for half in range(2):
            at = add(address(codes_smem), arith.muli(own(slot, half), const(GROUP // 2)))
            words = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", at)
            halves.append([pair for word in words for pair in _expand_word(word)])
            at = add(address(scales_smem), arith.muli(own(slot, half), const(CHANNELS // GROUP)), lanes()[2])
            [byte] = asm("ld.shared.u8 $0, [$1];", "r", at)
            # 2^(byte - 127) x 2^126 / 2^5 as one bfloat16, exponent byte + 121, or as two where that is too large.
            large.append(arith.cmpi(arith.CmpIPredicate.ugt, byte, const(254 - 121)))
            second = arith.shli(add(byte, arith.select(large[-1], const(-5), const(121))), const(7))
            nan = arith.cmpi(arith.CmpIPredicate.eq, byte, const(E8M0_NAN))
            seconds.append(arith.muli(arith.select(nan, const(0x7FC0), second), const(0x10001)))
        # One product is enough for almost every tile; the lanes of a warp agree, as wgmma needs them to.
        some = arith.extui(i32, arith.ori(*large))
        vote = ".reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p;"
        some = arith.cmpi(arith.CmpIPredicate.ne, *asm(vote, "r", some), const(0))
        branch = scf.IfOp(some, [i32] * (CHANNELS // 4), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            firsts = [arith.select(one, const(0x7E807E80), const(0x3F803F80)) for one in large]  # 2^126 or 1
            scf.yield_([word for half, first in zip(halves, firsts, strict=True) for word in _scale(half, first)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([word for half in halves for word in half])
        middle = list(branch.results)
        halves = [_scale(middle[half * 16 : half * 16 + 16], seconds[half]) for half in range(2)]
        registers = [half[column] for column in range(CHANNELS // 8) for half in halves]
        return fragment(registers, (TILE, CHANNELS), layout, ir.BF16Type.get())

    return decode(codes_smem, scales_smem, slot)


def reduce(
    dots_SH, weight_smem, visible_Q, out_QM, n, first_query, queries, place, key, *, step, block_size, keys, width
):  # fmt: skip
    """Scores and stores one wgmma's products: sum of weight x relu, mask, maximum over block_size keys."""

    def exchange(pairs, distance):
        """Adds across lanes that differ in one bit; of two values, a lane keeps the one its bit names."""
        bit = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(lanes()[1], const(distance)), const(0))
        kept = []
        for low, high in pairs:
            mine, other = (low, low) if high is None else (arith.select(bit, high, low), arith.select(bit, low, high))
            kept.append(arith.addf(mine, utils.shfl_bfly(other, distance)))
        return kept

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *[plgpu.RefType()] * 3, *[SCALAR] * 3, ROWS, ROWS))
    def emit(_, dots_SH, weight_smem, visible_Q, out_QM, n, first_query, queries, place, key):
        f32 = ir.F32Type.get()
        _, lane, quad = lanes()
        dots = np.array(per_thread(dots_SH), dtype=object).reshape(step, HEADS // 8, 2, 2)  # query, column, half, pair
        totals = [[utils.c(0.0, f32)] * 2 for _ in range(step)]
        weights = add(address(weight_smem), arith.muli(scalar(n), const(step * HEADS * 4)), arith.muli(quad, const(8)))
        for t, column in np.ndindex(step, HEADS // 8):
            at = add(weights, const((t * HEADS + column * 8) * 4))
            pair = asm("ld.shared.v2.b32 {$0, $1}, [$2];", "rr", at)
            for half, p in np.ndindex(2, 2):
                weighted_relu = ".reg .f32 r; max.NaN.f32 r, $1, 0f00000000; fma.rn.f32 $0, r, $2, $3;"
                operands = dots[t, column, half, p], llvm.bitcast(f32, pair[p]), totals[t][half]
                [totals[t][half]] = asm(weighted_relu, "f", *operands, pure=True)

        # (query, half) of the values a lane is left with, as the lane's bits tell.
        places, own_key = per_thread(place), per_thread(key)
        odd, upper = arith.andi(quad, const(1)), arith.shrui(quad, const(1))
        is_odd = arith.cmpi(arith.CmpIPredicate.ne, odd, const(0))
        if step == 4:
            low = exchange([(totals[0][h], totals[1][h]) for h in range(2)], 1)
            high = exchange([(totals[2][h], totals[3][h]) for h in range(2)], 1)
            values, query, stores = exchange(list(zip(low, high, strict=True)), 2), quad, const(1, 1)
            marks = list(zip(places, own_key, strict=True))
        else:
            values = exchange([tuple(total) for total in totals], 1)
            values = exchange([(values[0], values[1] if step == 2 else None)], 2)
            query = upper if step == 2 else const(0)
            stores = const(1, 1) if step == 2 else arith.cmpi(arith.CmpIPredicate.eq, upper, const(0))
            marks = [tuple(arith.select(is_odd, pair[1], pair[0]) for pair in (places, own_key))]

        stores = arith.andi(stores, arith.cmpi(arith.CmpIPredicate.slt, query, scalar(queries)))
        query = add(scalar(first_query), arith.select(stores, query, const(0)))
        at = add(address(visible_Q), arith.muli(wide(query), const(4, 64)))
        [visible] = asm("ld.global.nc.b32 $0, [$1];", "r", at, pure=True)
        visible = arith.minsi(visible, const(keys))
        leader = arith.cmpi(
            arith.CmpIPredicate.eq, arith.andi(arith.shrui(lane, const(2)), const(block_size - 1)), const(0)
        )
        for value, (one_place, one_key) in zip(values, marks, strict=True):
            seen = arith.cmpi(arith.CmpIPredicate.slt, one_key, visible)
            value = arith.select(seen, value, utils.c(-float("inf"), f32))
            [value] = asm("max.f32 $0, $1, 0fFF800000;", "f", value, pure=True)  # NaN loses
            for bit in range(block_size.bit_length() - 1):
                other = utils.shfl_bfly(value, 4 << bit)
                [value] = asm("max.f32 $0, $1, $2;", "f", value, other, pure=True)
            index = arith.shrui(one_place, const(block_size.bit_length() - 1))
            inside = arith.cmpi(arith.CmpIPredicate.slt, index, const(width))
            _store(out_QM, query, index, value, arith.andi(arith.andi(stores, leader), inside))

    emit(dots_SH, weight_smem, visible_Q, out_QM, n, first_query, queries, place, key)


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
