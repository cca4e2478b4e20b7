"""What one thread does with its part of a tile of 64 index keys: copy, expand, weigh.

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


def threads(count):
    """So many values of each thread, which are its own: not parts of an array."""
    return plgpu.Layout.WG_STRIDED((128 * count,), 1)


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
    register = layout.registers_element_type(dtype)
    registers = np.empty(len(values), dtype=object)
    registers[:] = [llvm.bitcast(register, value) for value in values]
    return FragmentedArray(
        _registers=registers.reshape(layout.registers_shape(shape)), _layout=layout, _is_signed=signed
    )


def copy_keys(codes_BSJ, scales_BSG, codes_smem, scales_smem, slot, sequence, key, whole):
    """Starts the copies of the 16 code bytes and the 4 scale bytes of this thread's two keys.

    `whole` says that a tile's keys are neighbours and all there: else each has its own address, and is kept in bounds.
    """
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
                bytes_ = group_bytes or key_bytes
                target = add(address(smem), arith.muli(own(slot, half), const(bytes_)))
                kind = "cg" if bytes_ == 16 else "ca"
                if not whole or half == 0:
                    one = one if whole else arith.minsi(one, const(keys - 1))  # what is not a key is masked later
                    at = add(source, arith.muli(wide(one), const(key_bytes, 64)))
                offset = 8 * key_bytes if whole and half else 0
                asm(f"cp.async.{kind}.shared.global [$0], [$1 + {offset}], {bytes_};", "", target, at)

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
        halves, bytes_ = [], []
        for half in range(2):
            at = add(address(codes_smem), arith.muli(own(slot, half), const(GROUP // 2)))
            words = asm("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "rrrr", at)
            halves.append([pair for word in words for pair in _expand_word(word)])
            at = add(address(scales_smem), arith.muli(own(slot, half), const(CHANNELS // GROUP)), lanes()[2])
            bytes_ += asm("ld.shared.u8 $0, [$1];", "r", at)

        def exponent(byte, bias):  # two bfloat16 of 2^(byte + bias - 127)
            return arith.muli(add(byte, const(bias)), const(0x00800080))

        # 2^(byte - 127) x 2^126 / 2^5 is one bfloat16, or two where that is too large. The lanes of a warp agree on
        # which, as wgmma needs them to.
        largest = 254 - 121
        some = arith.cmpi(arith.CmpIPredicate.ugt, arith.maxui(*bytes_), const(largest))
        vote = ".reg .pred p; setp.ne.b32 p, $1, 0; vote.sync.any.pred p, p, 0xFFFFFFFF; selp.b32 $0, 1, 0, p;"
        some = arith.cmpi(arith.CmpIPredicate.ne, *asm(vote, "r", arith.extui(i32, some)), const(0))
        branch = scf.IfOp(some, [i32] * (CHANNELS // 4 + 2), has_else=True)
        with ir.InsertionPoint(branch.then_block):
            middle, seconds = [], []
            for half, byte in zip(halves, bytes_, strict=True):
                large = arith.cmpi(arith.CmpIPredicate.ugt, byte, const(largest))
                nan = arith.cmpi(arith.CmpIPredicate.eq, byte, const(E8M0_NAN))
                middle += _scale(half, arith.select(large, const(0x7E807E80), const(0x3F803F80)))  # 2^126 or 1
                second = exponent(add(byte, arith.select(large, const(-126), const(0))), 121)
                seconds.append(arith.select(nan, const(0x7FC07FC0), second))
            scf.yield_([*middle, *seconds])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([*[word for half in halves for word in half], *[exponent(byte, 121) for byte in bytes_]])
        *middle, low, high = branch.results
        halves = [_scale(middle[:16], low), _scale(middle[16:], high)]
        registers = [half[column] for column in range(CHANNELS // 8) for half in halves]
        return fragment(registers, (TILE, CHANNELS), layout, ir.BF16Type.get())

    return decode(codes_smem, scales_smem, slot)


def load_weights(weight_smem, n, step):
    """The weights of the heads that this thread holds of the n-th queries of one wgmma."""
    layout = threads(step * HEADS // 4)
    result = plgpu.ShapeDtypeStruct((step * HEADS // 4 * 128,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=result)
    def load(_, weight_smem, n):
        start = add(address(weight_smem), arith.muli(scalar(n), const(step * HEADS * 4)))
        start = add(start, arith.muli(lanes()[2], const(8)))
        pairs = [
            asm("ld.shared.v2.b32 {$0, $1}, [$2];", "rr", add(start, const(column * 8 * 4)))
            for column in range(step * HEADS // 8)
        ]
        return fragment([word for pair in pairs for word in pair], result.shape, layout, ir.F32Type.get())

    return load(weight_smem, n)


def weigh(dots_SH, weights, step):
    """This thread's part of sum of weight x relu: for each query, its keys r and r + 8."""
    layout = threads(2 * step)
    result = plgpu.ShapeDtypeStruct((128 * 2 * step,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, threads(step * HEADS // 4)), return_type=result)
    def sum_heads(_, dots_SH, weights):
        f32 = ir.F32Type.get()
        dots = np.array(per_thread(dots_SH), dtype=object).reshape(step, HEADS // 8, 2, 2)  # query, column, half, pair
        weights = np.array(per_thread(weights), dtype=object).reshape(step, HEADS // 8, 2)
        totals = [utils.c(0.0, f32)] * (2 * step)
        for t, column, half, pair in np.ndindex(dots.shape):
            weighted_relu = ".reg .f32 r; max.NaN.f32 r, $1, 0f00000000; fma.rn.f32 $0, r, $2, $3;"
            operands = dots[t, column, half, pair], weights[t, column, pair], totals[2 * t + half]
            [totals[2 * t + half]] = asm(weighted_relu, "f", *operands, pure=True)
        return fragment(totals, result.shape, layout, f32)

    return sum_heads(dots_SH, weights)
