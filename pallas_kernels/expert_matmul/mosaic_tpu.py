"""Grouped matmul on TPU: weights stay packed until they are in fast memory, one block of outputs of one expert a step.

E2M1 codes become floats by the unpacking instruction for E5M2, of which they are a part: the three bits of a code's
size, shifted into the low exponent and high mantissa bits of an E5M2 byte, make its value times 2^-14, the codes 0 and
1 included. Four codes of a word shift at once. The low nibbles of a byte hold even channels, the high ones odd: x is
split the same way, 128 even channels and then their 128 odd neighbours, instead of interleaving the weights. XLA keeps
the scales of wide weights with the outputs along lanes, and so they are read.

A tile of few rows (decode) is bound by memory, so the weights are used as unpacked. For 256 channels the rows are
repeated 8 times, each copy with the channels of one scale group and zeros elsewhere: the product then has a row for
each group, and the scales, which lie along its lanes, multiply that.

A tile of many rows would pay 8 times for this. There the scales multiply the weights: a small transpose and a product
with a matrix of zeros and ones spread them over channels. That is exact, since every sum has one power of two that is
not zero; a NaN scale would spoil the sums of its neighbours, so it is replaced by 0 and its outputs are made NaN
after the product. The block stays dequantised while the tiles after it want the same expert, so the grid runs over
blocks of outputs first.

An empty tile names the block of the tile before it, which is not copied again.

Bytes: codes and scales once a run of tiles of one expert, x once a block of outputs, the result once. FLOP: 2 M R F D
in bfloat16, summed in float32, 8 times as many with few rows; and about 3 (few rows) or 6 vector operations for 1024
weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.formats import E8M0_NAN, FORMATS, Format

LANES = 128
CHANNELS = 256  # multiplied at a time: 8 groups of 32, the sublanes of a register
GROUPS = 8
FIRST = np.int32(0)  # a Python 0 in an index map would be 64 bits wide where x64 is on
TUNING = {
    "few_rows": 16,  # at most this many rows of a tile have the scales multiply the product
    "rows": 256,  # of a tile in one step
    "outputs": (512, 256, 128),  # in one step: the most that fit in VMEM
    "together": 5,  # turns of a loop in one stretch of code
    "vmem_bytes": 32 * 2**20,
}
FACTOR = {"e2m1": 2.0**14, "e4m3": 1.0}  # of a value over its 8-bit float
FORMATS_SERVED = ("fp4_e8m0_32", "fp8_e8m0_32x32")


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format: str | None):
    """See the contract."""
    if format not in FORMATS_SERVED:
        raise NotImplementedError(f"format {format}; weights come in {' and '.join(FORMATS_SERVED)}")
    if x_MRD.dtype != jnp.bfloat16:
        raise NotImplementedError(f"x of {x_MRD.dtype}; only bfloat16 is multiplied")
    M, R, D = x_MRD.shape
    E, F, width = codes_EFD.shape
    if D % CHANNELS:
        raise NotImplementedError(f"{D} channels; they are multiplied by {CHANNELS}")
    if 0 in (M, R, E, F, D):
        return jnp.zeros((M, R, F), jnp.float32)
    f = FORMATS[format]
    few = R <= TUNING["few_rows"]
    if few and R > 1:
        x_MRD = jnp.pad(x_MRD, ((0, 0), (0, TUNING["few_rows"] - R), (0, 0)))
    if f.element == "e2m1":
        pairs = x_MRD.reshape(*x_MRD.shape[:2], D // CHANNELS, LANES, 2)
        x_MRD = jnp.swapaxes(pairs, -1, -2).reshape(x_MRD.shape)
    if f.rows > 1:
        scales_EFG = jnp.repeat(scales_EFG, f.rows, axis=1)[:, :F]  # 1/32 of the codes
    scales_EGF = jnp.swapaxes(scales_EFG, 1, 2)
    G = D // f.group

    rows = min(x_MRD.shape[1], TUNING["rows"])
    outputs = _outputs(rows, F, D, width)
    if expert_M is None:
        expert_M = jnp.arange(M, dtype=jnp.int32)
    expert_M = jnp.minimum(expert_M.astype(jnp.int32), E - 1)  # as the reference clips; a copy from outside is fatal
    held_M, fresh_M = _plan(expert_M)
    if few:
        kernel, scratch = _few_rows, [pltpu.VMEM((G, outputs), jnp.float32)]
    else:
        kernel, scratch = _many_rows, [pltpu.VMEM((outputs, D), jnp.bfloat16), pltpu.VMEM((1, outputs), jnp.float32)]
    y_MRF = pl.pallas_call(
        functools.partial(kernel, f=f),
        out_shape=jax.ShapeDtypeStruct((M, x_MRD.shape[1], F), jnp.float32),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(F, outputs), M, pl.cdiv(x_MRD.shape[1], rows)),
            in_specs=[
                pl.BlockSpec((1, rows, D), lambda f, m, r, *_: (m, r, FIRST)),
                pl.BlockSpec((1, outputs, width), lambda f, m, r, expert, held, fresh: (held[m], f, FIRST)),
                pl.BlockSpec((1, G, outputs), lambda f, m, r, expert, held, fresh: (held[m], FIRST, f)),
            ],
            out_specs=pl.BlockSpec((1, rows, outputs), lambda f, m, r, *_: (m, r, f)),
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=TUNING["vmem_bytes"]
        ),
        name="expert_matmul",
    )(expert_M, held_M, fresh_M, x_MRD, codes_EFD, scales_EGF)
    return y_MRF[:, :R]


def _outputs(rows: int, F: int, D: int, width: int) -> int:
    """The widest block of outputs that fits in VMEM beside its tile of rows, in whole lanes."""
    for outputs in TUNING["outputs"]:
        outputs = min(outputs, -(-F // LANES) * LANES)
        buffered = 2 * (2 * rows * D + outputs * width + outputs * D // 32 + 4 * rows * outputs)
        if buffered + 2 * outputs * D + 64 * outputs * LANES <= TUNING["vmem_bytes"]:
            return outputs
    raise NotImplementedError(f"{rows} rows of {D} channels do not fit in {TUNING['vmem_bytes']} bytes of VMEM")


def _plan(expert_M):
    """The expert whose block each tile holds, that of the last tile with work, and whether the tile is its first."""
    work_M = expert_M >= 0
    tile_M = jnp.arange(expert_M.size, dtype=jnp.int32)
    first = jnp.argmax(work_M).astype(jnp.int32)
    last_M = lax.cummax(jnp.where(work_M, tile_M, first))
    held_M = jnp.maximum(expert_M[last_M], 0)
    changed_M = jnp.concatenate([jnp.ones((1,), bool), held_M[1:] != held_M[:-1]])
    return held_M, (work_M & (changed_M | (tile_M == first))).astype(jnp.int32)


def _few_rows(expert_ref, held_ref, fresh_ref, x_ref, codes_ref, scales_ref, out_ref, scale_ref, *, f):
    """One tile times one block of outputs; scales multiply the product of each group."""
    del held_ref
    m = pl.program_id(1)
    rows, outputs = out_ref.shape[1:]

    @pl.when(fresh_ref[m] == 1)
    def _():
        scale_ref[...] = _decode_e8m0(scales_ref[0].astype(jnp.int32))

    @pl.when(expert_ref[m] < 0)
    def _():
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    @pl.when(expert_ref[m] >= 0)
    def _():
        lane = lax.broadcasted_iota(jnp.int32, (GROUPS * rows, CHANNELS), 1)
        row = lax.broadcasted_iota(jnp.int32, (GROUPS * rows, CHANNELS), 0)
        lanes_a_group = f.group // f.channels_per_byte
        group = lax.rem(lax.div(lane, jnp.int32(lanes_a_group)), jnp.int32(GROUPS))
        mine = lax.div(row, jnp.int32(rows)) == group

        def add(c, sums):
            x = x_ref[0, :, pl.ds(pl.multiple_of(c * CHANNELS, CHANNELS), CHANNELS)]
            x = jnp.broadcast_to(x, mine.shape) if rows == 1 else jnp.concatenate([x] * GROUPS, axis=0)
            x = jnp.where(mine, x, jnp.zeros(x.shape, x.dtype))
            product = jnp.zeros((GROUPS * rows, outputs), jnp.float32)
            for i, part in enumerate(_unpack(codes_ref, c, f)):
                product += _dot(x[:, i * LANES : (i + 1) * LANES], part.astype(jnp.bfloat16))
            product *= jnp.float32(FACTOR[f.element])
            scale = scale_ref[pl.ds(pl.multiple_of(c * GROUPS, GROUPS), GROUPS), :]
            if rows == 1:
                return sums + product * scale
            return sums + jnp.sum(product.reshape(GROUPS, rows, outputs) * scale[:, None], axis=0)

        sums = jnp.zeros((GROUPS if rows == 1 else rows, outputs), jnp.float32)
        sums = _loop(x_ref.shape[2] // CHANNELS, add, sums)
        out_ref[0] = jnp.sum(sums, axis=0, keepdims=True) if rows == 1 else sums


def _many_rows(expert_ref, held_ref, fresh_ref, x_ref, codes_ref, scales_ref, out_ref, weight_ref, nan_ref, *, f):
    """One block of rows of one tile times one block of outputs; scales multiply the weights."""
    del held_ref
    m, r = pl.program_id(1), pl.program_id(2)

    @pl.when((fresh_ref[m] == 1) & (r == 0))
    def _():
        _dequantize(codes_ref, scales_ref, weight_ref, nan_ref, f)

    @pl.when(expert_ref[m] < 0)
    def _():
        out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

    @pl.when(expert_ref[m] >= 0)
    def _():
        out_ref[0] = _dot(x_ref[0], weight_ref[...]) + nan_ref[...]


def _dequantize(codes_ref, scales_ref, weight_ref, nan_ref, f: Format):
    """Fills the scratch with the weights, and a row with NaN where an output has a NaN scale, else 0."""
    byte_GF = scales_ref[0].astype(jnp.int32)
    nan_GF = byte_GF == E8M0_NAN
    spoilt_F = jnp.max(nan_GF.astype(jnp.int32), axis=0, keepdims=True) > 0
    nan_ref[...] = jnp.where(spoilt_F, jnp.float32(jnp.nan), jnp.float32(0))
    scale_FG = jnp.where(nan_GF, jnp.float32(0), _decode_e8m0(byte_GF)).T.astype(jnp.bfloat16)
    groups = scale_FG.shape[1]

    def fill(c, carry):
        group = lax.broadcasted_iota(jnp.int32, (groups, LANES), 0)
        lane = lax.broadcasted_iota(jnp.int32, (groups, LANES), 1)
        for i, values in enumerate(_unpack(codes_ref, c, f)):
            if i == 0 or f.element != "e2m1":  # both halves of an E2M1 byte share their group
                mine = group == c * GROUPS + lax.div(lane + i * LANES, jnp.int32(f.group // f.channels_per_byte))
                scale = jnp.dot(scale_FG, mine.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
            weight = values.astype(jnp.float32) * jnp.float32(FACTOR[f.element]) * scale
            start = pl.multiple_of(c * CHANNELS + i * LANES, LANES)
            weight_ref[:, pl.ds(start, LANES)] = weight.astype(jnp.bfloat16)
        return carry

    _loop(weight_ref.shape[1] // CHANNELS, fill, None)


def _loop(count: int, body, carry):
    """Runs carry = body(i, carry) `count` times, some of them in one stretch of code, so that they overlap."""
    together = max(n for n in range(1, TUNING["together"] + 1) if count % n == 0)

    def several(i, carry):
        for j in range(together):
            carry = body(i * together + j, carry)
        return carry

    return lax.fori_loop(jnp.int32(0), jnp.int32(count // together), several, carry)


def _unpack(codes_ref, c, f: Format):
    """The c-th CHANNELS channels of a block of codes as two parts [F, LANES] of 8-bit floats, to be times FACTOR."""
    width = CHANNELS // f.channels_per_byte
    codes = codes_ref[0, :, pl.ds(pl.multiple_of(c * width, width), width)]
    if f.element == "e4m3":
        values = lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
        return values[:, :LANES], values[:, LANES:]
    word = pltpu.bitcast(codes, jnp.int32)  # four bytes
    sign, size = jnp.int32(-0x7F7F7F80), jnp.int32(0x0E0E0E0E)
    even = (word << 4) & sign | (word << 1) & size
    odd = word & sign | (word >> 3) & size
    return pltpu.bitcast(even, jnp.float8_e5m2), pltpu.bitcast(odd, jnp.float8_e5m2)


def _decode_e8m0(byte):
    """`formats.decode_e8m0` in i32."""
    bits = jnp.where(byte == 0, 1 << 22, byte << 23)
    return jnp.where(byte == E8M0_NAN, jnp.float32(jnp.nan), lax.bitcast_convert_type(bits, jnp.float32))


def _dot(x, weight):
    """x @ weight^T, summed in float32."""
    return lax.dot_general(x, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
