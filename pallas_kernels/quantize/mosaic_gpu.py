"""Quantise and dequantise main entries on Hopper: one thread, one group of 16 channels, all in registers.

A block of threads takes GROUPS groups in a row; the last block moves back to end with the array, so that every read is
in bounds (what it shares with its neighbour is written twice, with the same bits). Rounding is by integers on float16
bits: scaled by 2^-14, a value has E2M1's exponent and mantissa as the top of a float16's, subnormals included, so that
dropping 9 bits, to nearest even, encodes two values at once; with 2^-8 and 7 bits the same encodes the E4M3 scale. The
quotients are not exact, yet every bfloat16 that is not a midpoint between codes stays at least half a step of float16
away from it, and those that are midpoints are rounded back onto it.

Bytes: 2.56 per channel, read and written once. Around 9 integer operations per channel quantise, 4 dequantise.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf, vector

from pallas_kernels.formats import E2M1_MAX, E4M3_NAN
from pallas_kernels.ptx import const, int_type

GROUP, BYTES = 16, 8  # channels of a group, and bytes of its codes
HOPPER = {"groups": 512, "least": 512}  # groups of a thread block; the fewest that are worth a kernel


def quantize(x, rotation=None, *, format: str):
    """See the contract."""
    count = _check(x.shape, x.dtype, format)
    arrays = [x.reshape(count, GROUP)]
    turned = 0
    if rotation is not None:
        turned = rotation[0].shape[-1] * 2 // GROUP
        if not turned or rotation[0].shape[-1] * 2 % GROUP or rotation[0].dtype != jnp.float32:
            raise NotImplementedError(f"{rotation[0].shape[-1]} {rotation[0].dtype} angles do not turn whole groups")
        arrays += [jnp.broadcast_to(a, (*x.shape[:-1], a.shape[-1])).reshape(-1, BYTES) for a in rotation]
    codes, scales = _call(
        functools.partial(_quantize_groups, per_row=x.shape[-1] // GROUP, turned=turned),
        arrays,
        [((count, BYTES), jnp.uint8), ((count,), jnp.uint8)],
        whole=len(arrays) - 1,
    )
    return codes.reshape(*x.shape[:-1], -1), scales.reshape(*x.shape[:-1], -1)


def dequantize(codes, scales, *, format: str, dtype):
    """See the contract."""
    count = _check((*codes.shape[:-1], 2 * codes.shape[-1]), jnp.dtype(dtype), format)
    arrays = [codes.reshape(count, BYTES), scales.reshape(count)]
    (x,) = _call(_dequantize_groups, arrays, [((count, GROUP), jnp.bfloat16)])
    return x.reshape(*codes.shape[:-1], -1)


def _check(shape, dtype, format: str) -> int:
    """Refuses what the kernels cannot serve; returns the number of groups."""
    if format != "fp4_e4m3_16":
        raise NotImplementedError(f"the kernel is for fp4_e4m3_16, not {format}")
    if dtype != jnp.bfloat16:
        raise NotImplementedError(f"values must be bfloat16, not {dtype}")
    count = math.prod(shape) // GROUP
    if count < HOPPER["least"]:
        raise NotImplementedError(f"{count} groups take XLA no longer; at least {HOPPER['least']} are worth a kernel")
    if count >= 2**31:
        raise NotImplementedError(f"{count} groups do not fit 32-bit indices")
    return count


def _call(groups_fn, arrays, outputs, whole: int = 0):
    """Runs `groups_fn(start, *refs)` over blocks of groups; the `whole` last inputs are not cut into blocks."""
    count, groups = arrays[0].shape[0], HOPPER["groups"]

    def body(*refs):
        start = jnp.minimum(lax.axis_index("block") * groups, jnp.int32(count - groups))
        cut = [i < len(arrays) - whole or i >= len(arrays) for i in range(len(refs))]
        types = [plgpu.RefType() for _ in refs]
        inline = plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT(()), *types))
        inline(lambda _, start, *refs: groups_fn(start.registers.item(), *refs))(
            start, *(r.at[pl.ds(start, groups)] if c else r for r, c in zip(refs, cut, strict=True))
        )

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in outputs],
        grid=(pl.cdiv(count, groups),),
        grid_names=("block",),
    )(*arrays)


def _and(x, mask: int):
    return arith.andi(x, const(mask))


def _up(x, bits: int):
    return arith.shli(x, const(bits))


def _down(x, bits: int):
    return arith.shrui(x, const(bits))


def _cast(x, count: int, element):
    """Reads a register or vector as `count` values of the element type."""
    if not isinstance(x.type, ir.VectorType):
        x = vector.broadcast(ir.VectorType.get((1,), x.type), x)
    return vector.bitcast(ir.VectorType.get((count,), element), x)


def _parts(x):
    """The elements of a vector."""
    return [vector.extract(x, [], [i]) for i in range(ir.VectorType(x.type).shape[0])]


def _word(x):
    """Reads a vector of 32 bits as one integer."""
    return _parts(_cast(x, 1, int_type()))[0]


def _f32(value: float):
    return mgpu.c(value, ir.F32Type.get())


def _as_f32(bits):
    return arith.bitcast(ir.F32Type.get(), bits)


def _round_bits(bits, drop: int, lanes: int):
    """Adds what makes dropping the low bits round to nearest, ties to even; `lanes` has a 1 for each value."""
    odd = _and(_down(bits, drop), lanes)
    return arith.addi(arith.addi(bits, const(((1 << drop - 1) - 1) * lanes)), odd)


def _quantize_groups(start, x, *refs, per_row: int, turned: int):
    """Quantises one block of groups."""
    *angles, codes_out, scales_out = refs
    loaded = mgpu.FragmentedArray.load_strided(x, vec_size=GROUP)
    i8, i16, f16 = (int_type(8), int_type(16), ir.F16Type.get())
    codes, scales = loaded.registers.copy(), loaded.registers.copy()
    for i, values in enumerate(loaded.registers.flat):
        words = _parts(_cast(values, 8, int_type()))
        if turned:
            group = arith.addi(start, arith.addi(mgpu.thread_idx(), const(128 * i)))
            words = _rotate(words, group, *angles, per_row=per_row, turned=turned)
        sizes = [_and(word, 0x7FFF7FFF) for word in words]
        pairs = [_cast(size, 2, i16) for size in sizes]
        low, high = (arith.extui(int_type(), part) for part in _parts(functools.reduce(arith.maxui, pairs)))
        largest = arith.maxui(low, high)  # bits of bfloat16 order like numbers, then inf, then NaN
        wild = arith.cmpi(arith.CmpIPredicate.uge, largest, const(0x7F80))

        amax = arith.maximumf(_as_f32(_up(largest, 16)), _f32(E2M1_MAX * 2.0**-9))
        sixth = arith.truncf(f16, arith.mulf(amax, _f32(2.0**-8 / E2M1_MAX)))
        scale = _down(_round_bits(arith.extui(int_type(), arith.bitcast(i16, sixth)), 7, 1), 7)
        scale = arith.minui(scale, const(E4M3_NAN - 1))
        decoded = arith.bitcast(f16, arith.trunci(i16, _up(scale, 7)))  # times 2^-8
        inverse = arith.divf(_f32(2.0**-22), arith.extf(ir.F32Type.get(), decoded))

        nibbles = []
        for word, size in zip(words, sizes, strict=True):
            pair = ir.VectorType.get((2,), ir.F32Type.get())
            even, odd = _as_f32(_up(size, 16)), _as_f32(_and(size, 0xFFFF0000))
            quotients = vector.from_elements(pair, [arith.mulf(even, inverse), arith.mulf(odd, inverse)])
            rounded = _round_bits(_word(arith.truncf(ir.VectorType.get((2,), f16), quotients)), 9, 0x00010001)
            most = arith.minui(_cast(rounded, 2, i16), _cast(const(0x0FFF0FFF), 2, i16))
            code = _and(_down(_word(most), 9), 0x00070007)
            nibbles.append(arith.ori(code, _and(_down(word, 12), 0x00080008)))
        signs = arith.select(wild, const(0x88888888), const(0xFFFFFFFF))
        packed = [arith.andi(_pack(nibbles[k : k + 4]), signs) for k in (0, 4)]
        both = vector.from_elements(ir.VectorType.get((2,), int_type()), packed)
        codes.flat[i] = _cast(both, BYTES, i8)
        scale = arith.select(wild, const(E4M3_NAN), scale)
        scales.flat[i] = vector.broadcast(ir.VectorType.get((1,), i8), arith.trunci(i8, scale))
    _store(codes, codes_out, BYTES)
    _store(scales, scales_out, 1)


def _pack(nibbles):
    """Eight codes in four registers, at bits 0 and 16 of each, to one word, the first lowest."""
    halves = []
    for low, high in (nibbles[:2], nibbles[2:]):
        four = arith.ori(low, _up(high, 8))
        halves.append(arith.ori(four, _down(four, 12)))
    return arith.ori(_and(halves[0], 0xFFFF), _up(halves[1], 16))


def _rotate(words, group, cos, sin, *, per_row: int, turned: int):
    """Turns the pairs of channels of the last `turned` groups of a row; the others pass."""
    row, place = arith.divui(group, const(per_row)), arith.remui(group, const(per_row))
    place = arith.subi(place, const(per_row - turned))
    inside = arith.cmpi(arith.CmpIPredicate.sge, place, const(0))
    branch = scf.IfOp(inside, [int_type()] * len(words), has_else=True)
    with ir.InsertionPoint(branch.then_block):
        index = arith.index_cast(ir.IndexType.get(), arith.addi(arith.muli(row, const(turned)), place))
        zero, eight = mgpu.c(0, ir.IndexType.get()), ir.VectorType.get((BYTES,), ir.F32Type.get())
        cosines, sines = (_parts(vector.load(eight, angles, [index, zero])) for angles in (cos, sin))
        bf16, out = ir.VectorType.get((2,), ir.BF16Type.get()), []
        for word, c, s in zip(words, cosines, sines, strict=True):
            even, odd = _as_f32(_up(word, 16)), _as_f32(_and(word, 0xFFFF0000))
            pair = [
                arith.subf(arith.mulf(even, c), arith.mulf(odd, s)),
                arith.addf(arith.mulf(even, s), arith.mulf(odd, c)),
            ]
            pair = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), pair)
            out.append(_word(arith.truncf(bf16, pair)))
        scf.yield_(out)
    with ir.InsertionPoint(branch.else_block):
        scf.yield_(words)
    return list(branch.results)


def _dequantize_groups(start, codes, scales, x_out):
    """Dequantises one block of groups."""
    del start
    codes = mgpu.FragmentedArray.load_strided(codes, is_signed=False, vec_size=BYTES)
    scales = mgpu.FragmentedArray.load_strided(scales, is_signed=False, vec_size=1)
    bf16, x = ir.BF16Type.get(), codes.registers.copy()

    def power(exponent):
        return _cast(const((exponent + 127 << 7) * 0x00010001), 2, bf16)

    for i, (code, scale) in enumerate(zip(codes.registers.flat, scales.registers.flat, strict=True)):
        byte = arith.extui(int_type(), _parts(scale)[0])
        size = _and(byte, 0x7F)
        bits = arith.ori(_up(_and(byte, 0x80), 8), _up(size, 4))  # of a bfloat16 that lacks 2^120
        nan = arith.cmpi(arith.CmpIPredicate.eq, size, const(E4M3_NAN))
        bits = arith.muli(arith.select(nan, const(0x7FC0), bits), const(0x00010001))
        factor = arith.mulf(arith.mulf(_cast(bits, 2, bf16), power(120)), power(118))
        words = []
        for word in _parts(_cast(code, 2, int_type())):
            for k in range(4):
                two = _and(arith.muli(_and(_down(word, 8 * k), 0xFF), const(0x1001)), 0x000F000F)
                placed = _and(arith.muli(two, const(0x1040)), 0x81C081C0)  # in bfloat16s that lack 2^126
                words.append(_word(arith.mulf(arith.mulf(_cast(placed, 2, bf16), factor), power(8))))
        x.flat[i] = _cast(vector.from_elements(ir.VectorType.get((8,), int_type()), words), GROUP, bf16)
    _store(x, x_out, GROUP)


def _store(registers, out, width: int):
    """Writes one vector of `width` values for each group."""
    layout = mgpu.WGStridedFragLayout(shape=tuple(ir.MemRefType(out.type).shape), vec_size=width)
    is_signed = False if isinstance(ir.MemRefType(out.type).element_type, ir.IntegerType) else None
    array = mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=is_signed)
    array.store_untiled(out, optimized=False)
