"""Grouped matmul on Hopper: packed weights stream past a small tile of rows and are decoded in registers.

One thread block takes 64 output channels of one expert and walks over D. TMA copies 64 bytes of codes of each channel
and the matching columns of x into a ring in shared memory; the scales of the 64 channels lie together and come in one
copy. The weights are the register operand of wgmma (its 64-row side), the rows of x its N side, so that one row costs
as little as eight. A thread loads 16 bytes of one channel's codes, all of one scale group. Shifts and masks put the
bits of a code where a bfloat16 has them; two exact multiplications, by the power of two that is then missing and by
the scale, finish it. Which column meets which step of wgmma is free as long as both operands agree, so x, the small
one, is permuted beforehand (`_arrange`). Where there are too few channels to fill the chip, D is split and XLA adds
the parts.

Bytes: 0.53 (FP4) or 1.001 (FP8) per weight, once for each tile of up to 128 rows. FLOPs: 2 per weight and row, with
the rows padded to a multiple of 8. Decoding costs about 2 integer operations per weight.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf, vector

from pallas_kernels.formats import E8M0_NAN, FORMATS
from pallas_kernels.ptx import add, const, int_type

HOPPER = {"rows": 128, "blocks": 792, "tiles": 2, "smem": 36 * 1024, "stages": 6, "max_rows": 1024, "max_width": 16384}
CHANNELS = 64  # the register side of one wgmma
WIDTH = 64  # bytes of one channel's codes in one tile: 16 for each of the four threads that share a channel

# By the bits of a code: the bits of a bfloat16 that it fills, twice, and the power of two that is then missing.
DECODE = {4: (0x81C081C0, 126), 8: (0x87F087F0, 120)}

CODES_TILING = plgpu.TilingTransform((CHANNELS, WIDTH))  # so that threads read shared memory without conflicts
# Thread t holds 16 bytes of channel 16 * (t // 32) + t % 32 // 4, and 16 of the channel 8 further on.
CODES_LAYOUT = mgpu.TiledLayout(
    plgpu.Tiling(((CHANNELS, WIDTH), (16, WIDTH), (8, WIDTH), (16,))),
    warp_dims=(-7,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format: str):
    """See the contract."""
    M, R, D = x_MRD.shape
    E, F, _ = codes_EFD.shape
    bits = _check(x_MRD, F, format)
    N = min(-(-R // 8) * 8, HOPPER["rows"])
    row_blocks = -(-R // N)
    columns = WIDTH * 8 // bits
    tiles = HOPPER["tiles"] if N <= 32 and D % (HOPPER["tiles"] * columns) == 0 else 1
    steps = D // (tiles * columns)
    parts = min(max(1, HOPPER["blocks"] // (M * row_blocks * F // CHANNELS)), max(1, steps // 4))
    line = 256 if bits == 4 else 16  # scales are copied in lines: whole ones belong to 64 channels
    lines = CHANNELS * (D // 32) // (1 if bits == 4 else 32) // line

    spare = HOPPER["smem"] - lines * line
    stages = max(2, min(HOPPER["stages"], steps // parts, spare // (tiles * (CHANNELS * WIDTH + N * columns * 2))))

    x = _arrange(jnp.pad(x_MRD, ((0, 0), (0, row_blocks * N - R), (0, 0))), 16 // bits).reshape(-1, N, D)
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    body = functools.partial(_body, bits=bits, tiles=tiles, steps=steps, parts=parts, stages=stages, lines=lines, N=N)
    experts = () if expert_M is None else (expert_M.astype(jnp.int32),)
    if expert_M is None:
        body = functools.partial(body, None)
    y_PMRF = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((parts, M, R, F), jnp.float32),
        grid=(parts, M * row_blocks, F // CHANNELS),
        grid_names=("part", "tile", "channels"),
        scratch_types=[
            plgpu.SMEM((stages, N, tiles * columns), jnp.bfloat16, transforms=swizzled),
            plgpu.SMEM((stages, CHANNELS, tiles * WIDTH), jnp.uint8, transforms=(CODES_TILING,)),
            plgpu.SMEM((-(-lines * line // 128) * 128 // line, line), jnp.uint8),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(),
        ],
    )(*experts, x, codes_EFD, scales_EFG.reshape(E, -1, line))
    return y_PMRF[0] if parts == 1 else y_PMRF.sum(0)


def _check(x_MRD, F: int, format: str) -> int:
    """Refuses what the kernel cannot serve; returns the bits of a code."""
    M, R, D = x_MRD.shape
    if format not in ("fp4_e8m0_32", "fp8_e8m0_32x32"):
        raise NotImplementedError(f"weights are FP4 or FP8 in 32x32 blocks, not {format}")
    if x_MRD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"rows must be bfloat16, not {x_MRD.dtype}")
    bits = 4 if FORMATS[format].element == "e2m1" else 8
    whole = 128 if bits == 4 else 256
    if F % CHANNELS or D % whole or not F or not D:
        raise NotImplementedError(f"[{F}, {D}] weights are not whole tiles of {CHANNELS} channels and {whole} columns")
    if D > HOPPER["max_width"]:
        raise NotImplementedError(f"scales of {D} columns do not fit in shared memory; {HOPPER['max_width']} do")
    if not M or not R:
        raise NotImplementedError(f"{M} tiles of {R} rows are empty")
    if R > HOPPER["max_rows"]:
        raise NotImplementedError(f"{R} rows reuse decoded weights; up to {HOPPER['max_rows']} are worth a kernel")
    return bits


def _arrange(x_MRD, pairs: int):
    """Orders the columns as the threads hold them; `pairs` is pairs of codes in a word of 32 bits."""
    # A word's pair p is its codes p and p + pairs. wgmma's columns 8 q + 2 c + e are pair q of thread c, code e of two.
    split = x_MRD.reshape(*x_MRD.shape[:2], -1, 4, 4, 2, pairs)  # thread, word, code of the pair, pair
    return jnp.transpose(split, (0, 1, 2, 4, 6, 3, 5)).reshape(x_MRD.shape)


def _body(
    expert_gmem, x_gmem, codes_gmem, scales_gmem, out_gmem, x, codes, scales, ready, scales_ready, *, bits, tiles,
    steps, parts, stages, lines, N,
):  # fmt: skip
    """One thread block: 64 channels, N rows, one part of D."""
    part, tile, channels = lax.axis_index("part"), lax.axis_index("tile"), lax.axis_index("channels")
    row_blocks = x_gmem.shape[0] // out_gmem.shape[1]
    columns = tiles * WIDTH * 8 // bits
    expert = lax.div(tile, jnp.int32(row_blocks))
    if expert_gmem is not None:
        expert = expert_gmem[expert]
    start, stop = (lax.div((part + k) * jnp.int32(steps), jnp.int32(parts)) for k in (0, 1))
    stop = jnp.where(expert < 0, start, stop)  # an empty tile takes no step

    def fetch(step):
        slot = lax.rem(step - start, jnp.int32(stages))
        plgpu.copy_gmem_to_smem(x_gmem.at[tile, :, pl.ds(step * columns, columns)], x.at[slot], ready.at[slot])
        bytes_ = pl.ds(step * (tiles * WIDTH), tiles * WIDTH)
        source = codes_gmem.at[expert, pl.ds(channels * CHANNELS, CHANNELS), bytes_]
        plgpu.copy_gmem_to_smem(source, codes.at[slot], ready.at[slot])

    @pl.when(expert >= 0)
    def _():
        plgpu.copy_gmem_to_smem(scales_gmem.at[expert, pl.ds(channels * lines, scales.shape[0])], scales, scales_ready)

    for ahead in range(stages):
        pl.when(start + ahead < stop)(functools.partial(fetch, start + ahead))
    pl.when(expert >= 0)(lambda: plgpu.barrier_wait(scales_ready))

    def walk(acc):
        def one(step, _):
            slot = lax.rem(step - start, jnp.int32(stages))
            plgpu.barrier_wait(ready.at[slot])
            for t in range(tiles):
                width = columns // tiles
                weights = _decode(codes.at[slot], t, scales, step * tiles + t, bits, columns * steps // 32)
                plgpu.wgmma(acc, weights, x.at[slot, :, pl.ds(t * width, width)].T)
            plgpu.wgmma_wait(0)
            pl.when(step + stages < stop)(lambda: fetch(step + stages))

        lax.fori_loop(start, stop, one, None)
        return acc[...]

    y_FN = pl.run_scoped(walk, plgpu.ACC((CHANNELS, N), jnp.float32))
    first_row = lax.rem(tile, jnp.int32(row_blocks)) * N
    _store(y_FN, out_gmem.at[part, lax.div(tile, jnp.int32(row_blocks))], first_row, channels * CHANNELS)


def _decode(codes, t: int, scales, tile, bits: int, groups: int):
    """Decodes tile t of `codes`, the channel's tile number `tile`, to bfloat16 in registers."""
    columns = WIDTH * 8 // bits
    filled, missing = DECODE[bits]
    largest = 254 - missing  # the scale byte whose power of two, times the missing one, is bfloat16's largest

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType((CODES_TILING,)), plgpu.RefType(), plgpu.Layout.WG_SPLAT(())),
        return_type=plgpu.ShapeDtypeStruct((CHANNELS, columns), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def decode(_, codes, scales, tile):
        i32, pair = int_type(), ir.VectorType.get((2,), ir.BF16Type.get())
        words = ir.VectorType.get((4,), i32)

        def as_pair(x):
            return vector.bitcast(pair, vector.broadcast(ir.VectorType.get((1,), i32), x))

        def power(exponent):  # a bfloat16's exponent field, twice
            return arith.muli(exponent, const(0x00800080))

        def place_bits(word):  # of the word's pairs of codes p and p + 16 / bits
            if bits == 4:
                shifted = arith.shrui(word, const(8))
                for source, low in ((word, 0), (word, 4), (shifted, 0), (shifted, 4)):
                    code = arith.andi(source, const(0x000F000F << low))
                    twice = arith.muli(code, const((1 << 12 | 1 << 6) >> low))  # the sign and the magnitude in place
                    yield as_pair(arith.andi(twice, const(filled)))
            else:
                for up in (arith.shli(word, const(8)), word):
                    sign = arith.andi(up, const(0x80008000))
                    yield as_pair(arith.ori(sign, arith.andi(arith.shrui(up, const(4)), const(0x07F007F0))))

        thread, tile = mgpu.thread_idx(), tile.registers.item()
        quarter, channel = arith.andi(thread, const(3)), _channel(thread)
        if bits == 4:  # a scale for each channel and the thread's 32 columns
            group = arith.addi(arith.shli(tile, const(2)), quarter)
            rows = [arith.addi(channel, const(half)) for half in (0, 8)]
        else:  # a scale for 32 channels and the 32 columns of two threads
            group = arith.addi(arith.shli(tile, const(1)), arith.shrui(quarter, const(1)))
            rows = [arith.shrui(channel, const(5))] * 2
        scales = mgpu.memref_fold(scales, 0, 2)
        raw = mgpu.FragmentedArray.load_untiled(
            mgpu.memref_slice(codes, (0, t)), layout=CODES_LAYOUT, is_signed=False, optimized=False
        )

        values, exponents = [], []
        for row, loaded in zip(rows, raw.registers.flat, strict=True):
            place = arith.index_cast(ir.IndexType.get(), arith.addi(arith.muli(row, const(groups)), group))
            exponent = arith.extui(i32, memref.load(scales, [place]))
            loaded = [vector.extract(vector.bitcast(words, loaded), [], [j]) for j in range(4)]
            if bits == 8:  # a NaN code makes the sums of its channel NaN, and so does a NaN scale
                carries = [arith.addi(arith.andi(word, const(0x7F7F7F7F)), const(0x01010101)) for word in loaded]
                nan = arith.andi(functools.reduce(arith.ori, carries), const(0x80808080))
                found = arith.cmpi(arith.CmpIPredicate.ne, nan, const(0))
                exponent = arith.select(found, const(E8M0_NAN), exponent)
            scale = as_pair(power(arith.addi(arith.minui(exponent, const(largest)), const(missing))))
            values.append([arith.mulf(bits_, scale) for word in loaded for bits_ in place_bits(word)])
            exponents.append(exponent)

        def rest(exponent):  # what scales above the largest still lack
            lacks = power(arith.addi(arith.maxui(exponent, const(largest)), const(127 - largest)))
            is_nan = arith.cmpi(arith.CmpIPredicate.eq, exponent, const(E8M0_NAN))
            return as_pair(arith.select(is_nan, const(0x7FC07FC0), lacks))

        huge = arith.cmpi(arith.CmpIPredicate.ugt, arith.maxui(*exponents), const(largest))
        branch = scf.IfOp(huge, [pair] * (2 * len(values[0])), has_else=True)
        pairs = zip(values, exponents, strict=True)
        with ir.InsertionPoint(branch.then_block):
            scf.yield_([arith.mulf(v, r) for half, e in pairs for r in [rest(e)] for v in half])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([v for half in values for v in half])
        shape = mgpu.WGMMA_LAYOUT.registers_shape((CHANNELS, columns))
        registers = np.array(list(branch.results), dtype=object).reshape(2, -1).T.reshape(shape)
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return decode(codes, scales, tile)


def _channel(thread):
    """The first of the two channels, 8 apart, that a thread holds."""
    warp, lane = arith.shrui(thread, const(5)), arith.andi(thread, const(31))
    return arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))


def _store(y_FN, out_RF, first_row, first_channel):
    """Writes the tile transposed, without the rows that pad it."""

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), plgpu.Layout.WG_SPLAT(()), plgpu.Layout.WG_SPLAT(()))
    )
    def store(_, y, out, first_row, first_channel):
        index = ir.IndexType.get()
        thread = mgpu.thread_idx()
        channel = add(first_channel.registers.item(), _channel(thread))
        row = add(first_row.registers.item(), arith.shli(arith.andi(thread, const(3)), const(1)))
        rows = const(ir.MemRefType(out.type).shape[0])
        for i, pair in enumerate(y.registers.flat):
            for k in range(2):
                here = add(row, const(8 * (i // 2) + k))
                with mgpu.when(arith.cmpi(arith.CmpIPredicate.slt, here, rows)):
                    place = [arith.index_cast(index, a) for a in (here, add(channel, const(8 * (i % 2))))]
                    memref.store(vector.extract(pair, [], [k]), out, place)

    store(y_FN, out_RF, first_row, first_channel)
