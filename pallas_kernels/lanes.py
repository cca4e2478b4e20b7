"""Operations on the registers of a lane and of its warp, under Lane semantics: what Pallas lacks.

An array is [lanes * registers]: each lane of a warpgroup holds the same number of registers. A scalar may differ
between lanes here.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels import ptx
from pallas_kernels.ptx import asm, const, int_type, space

WARPGROUP, WARP = 128, 32
QUAD = 4  # adjacent keys a lane holds: one 16-byte load


def lanewise(emit, refs=(), values=(), returns=None):
    """Calls emit(address..., registers...) in every lane; `returns`: registers of the result, 0 for a scalar."""

    def layout(shape):
        return plgpu.Layout.WG_STRIDED(shape, vec_size=1) if shape else plgpu.Layout.WG_SPLAT(())

    shape = (WARPGROUP * returns,) if returns else ()
    values = [plgpu.layout_cast(value, layout(value.shape)) if value.shape else value for value in values]
    result = None if returns is None else plgpu.ShapeDtypeStruct(shape, jnp.int32, layout=layout(shape))

    @plgpu.inline_mgpu(
        arg_types=(*(plgpu.RefType() for _ in refs), *(layout(value.shape) for value in values)),
        return_type=result,
    )
    def inlined(_, *args):
        addresses = [ptx.address(ref) for ref in args[: len(refs)]]
        registers = [_scalars(value) for value in args[len(refs) :]]
        emitted = emit(*addresses, *registers)
        if returns == 0:
            return mgpu.FragmentedArray.splat(emitted, (), is_signed=True)
        if returns:
            vectors = [vector.broadcast(ir.VectorType.get((1,), int_type()), value) for value in emitted]
            return mgpu.FragmentedArray(
                _registers=np.array(vectors, dtype=object),
                _layout=mgpu.WGStridedFragLayout(shape, vec_size=1),
                _is_signed=True,
            )
        return None

    return inlined(*refs, *values)


def _scalars(value):
    """The registers of an array or scalar as i32 values."""
    if not value.shape:
        return [value.registers.item()]
    return [vector.extract(register, [], [0]) for register in value.registers.flat]


def _at(base, index):
    """The address of a 4-byte element."""
    if base.type == int_type(64):
        index = arith.extsi(int_type(64), index)
    return arith.addi(base, arith.muli(index, mgpu.c(4, base.type)))


def thread():
    """The lane's number in its thread block."""
    return lanewise(mgpu.thread_idx, returns=0)


def slots(registers, run):
    """Numbers a warp's registers: lanes take turns of `run` registers, so that a lane's run is adjacent."""

    def emit():
        lane = arith.remui(mgpu.thread_idx(), const(WARP))
        first = arith.muli(lane, const(run))
        return [arith.addi(first, const(i // run * WARP * run + i % run)) for i in range(registers)]

    return lanewise(emit, returns=registers)


def sync():
    """Waits for every lane of the thread block; what they stored is visible then."""
    lanewise(lambda: asm("bar.sync 0;", "") and None)


def load(ref, index, mode):
    """Loads int32 bits, -1 where the index is negative.

    Four registers at a time: "each" its own, "quad" four adjacent and aligned ones, "shared" one for all four.
    """
    registers = index.size // WARPGROUP if index.shape else 0

    def emit(address, indices):
        width = {"each": 1, "quad": QUAD, "shared": 1}[mode]
        out = "{$0, $1, $2, $3}" if width == QUAD else "$0"
        clear = " ".join(f"mov.b32 ${i}, -1;" for i in range(width))
        kind = space(address) + (".v4.b32" if width == QUAD else ".b32")
        text = f".reg .pred p; setp.ge.s32 p, ${width + 1}, 0; {clear} @p ld.{kind} {out}, [${width}];"
        loaded = []
        for leader in indices if mode == "each" else indices[::QUAD]:
            values = asm(text, "r" * width, _at(address, leader), leader)
            loaded += values * QUAD if mode == "shared" else values
        return loaded if registers else loaded[0]

    return lanewise(emit, [ref], [index], registers)


def store(ref, index, value):
    """Stores int32 where the index is not negative."""

    def emit(address, indices, values):
        text = f".reg .pred p; setp.ge.s32 p, $1, 0; @p st.{space(address)}.b32 [$0], $2;"
        for i, v in zip(indices, values, strict=True):
            asm(text, "", _at(address, i), i, v)

    lanewise(emit, [ref], [index, value])


def count(ref, distance, span, shift, first):
    """Adds one to the counter first + distance >> shift in shared memory if the distance, unsigned, is in the span."""
    text = (
        ".reg .pred p; .reg .b32 a; setp.le.u32 p, $1, $2; shr.u32 a, $1, $3; mad.lo.u32 a, a, 4, $0; "
        "@p red.shared.add.u32 [a], 1;"
    )

    def emit(address, distances, span, shift, first):
        for d in distances:
            asm(text, "", _at(address, first[0]), d, span[0], shift[0])

    lanewise(emit, [ref], [distance, span, shift, first])


def leading_zeros(value):
    """Of a scalar."""
    return lanewise(lambda v: asm("clz.b32 $0, $1;", "r", v[0])[0], [], [value], 0)


def lane_max(values, parts):
    """Maxima of a lane's registers in so many parts."""

    def emit(registers):
        return [functools.reduce(arith.maxsi, registers[part::parts]) for part in range(parts)]

    return lanewise(emit, [], [values], parts)


def _prefix(value):
    """Inclusive sums over the lanes of a warp."""
    for distance in (1, 2, 4, 8, 16):
        (value,) = asm(
            ".reg .pred p; .reg .b32 t; "
            f"shfl.sync.up.b32 t|p, $1, {distance}, 0, 0xffffffff; @!p mov.b32 t, 0; add.s32 $0, $1, t;",
            "r",
            value,
        )
    return value


def _byte(value, i):
    return arith.andi(arith.shrui(value, const(8 * i)), const(255))


def warp_cumsum(values, run):
    """Inclusive sums over a warp's registers in the order of `_slots`."""
    registers = values.size // WARPGROUP

    def emit(addends):
        inclusive = list(addends)
        for i in range(registers):
            if i % run:
                inclusive[i] = arith.addi(inclusive[i - 1], addends[i])
        ends = inclusive[run - 1 :: run]
        sums = [_prefix(end) for end in ends]
        carry, out = const(0), []
        for group, (end, total) in enumerate(zip(ends, sums, strict=True)):
            before = arith.addi(carry, arith.subi(total, end))
            out += [arith.addi(before, value) for value in inclusive[group * run : (group + 1) * run]]
            if (group + 1) * run < registers:
                last = asm("shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", "r", total)[0]
                carry = arith.addi(carry, last)
        return out

    return lanewise(emit, [], [values], registers)


def warp_ranks(flags, before):
    """How many of the warp's flags (0 or 1) come earlier in the order of `_slots`, plus `before`."""
    registers = flags.size // WARPGROUP

    def emit(flags, before):
        runs = [flags[first : first + QUAD] for first in range(0, registers, QUAD)]
        # A byte for each run: no more than 128 flags of one are set. Four runs share a prefix sum.
        packed = [arith.shli(functools.reduce(arith.addi, run), const(8 * i)) for i, run in enumerate(runs)]
        own = functools.reduce(arith.addi, packed)
        sums = _prefix(own)
        (every,) = asm("shfl.sync.idx.b32 $0, $1, 31, 31, 0xffffffff;", "r", sums)
        earlier, base, ranks = arith.subi(sums, own), before[0], []
        for i, run in enumerate(runs):
            rank = arith.addi(base, _byte(earlier, i))
            base = arith.addi(base, _byte(every, i))
            for flag in run:
                ranks.append(rank)
                rank = arith.addi(rank, flag)
        return ranks

    return lanewise(emit, [], [flags, before], registers)


def warp_reduce(kind, values):
    """The sum ("add"), "min" or "max" over a warp's registers, a scalar that differs between warps only."""

    def emit(registers):
        join = {"add": arith.addi, "min": arith.minsi, "max": arith.maxsi}[kind]
        return asm(f"redux.sync.{kind}.s32 $0, $1, 0xffffffff;", "r", functools.reduce(join, registers))[0]

    return lanewise(emit, [], [values], 0)
