"""Mixing weights on a GPU: a thread holds one row's M logits in registers and does all iterations there.

As separate XLA operations the iterations are three launches each, some 60 for one call, and launches are what a decode
step waits for. Bytes: 2 M floats a row. Some 2 Z Z divisions an iteration; about 2 us whatever the rows, up to the
chip's number of threads.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.lanes import WARPGROUP

MOST_STREAMS = 4  # Z * Z values live in a thread's registers


def sinkhorn(logits_RM, *, streams: int, iterations: int, eps: float):
    """See the contract."""
    Z, (rows, columns) = streams, logits_RM.shape
    if Z > MOST_STREAMS:
        raise NotImplementedError(f"{Z} streams; {MOST_STREAMS} at most fit in a thread's registers")
    if logits_RM.dtype != jnp.float32:
        raise NotImplementedError(f"the logits are {logits_RM.dtype.name}; this kernel reads float32")
    if rows == 0:
        return logits_RM
    eps = np.float32(eps)  # a jax array would become an operand of the kernel

    def body(logits_gmem, out_gmem):
        row = lax.axis_index("block") * WARPGROUP + lanes.lanewise(lambda: [mgpu.thread_idx()], returns=1)

        def column(m):
            bits = lanes.load(logits_gmem, jnp.where(row < rows, row * columns + m, -1), "each")
            return lax.bitcast_convert_type(bits, jnp.float32)

        def write(m, value):
            bits = lax.bitcast_convert_type(value, jnp.int32)
            lanes.store(out_gmem, jnp.where(row < rows, row * columns + m, -1), bits)

        for m in range(2 * Z):
            weight = 1 / (1 + jnp.exp(-column(m)))
            write(m, weight + eps if m < Z else 2 * weight)
        comb = [[column((2 + i) * Z + j) for j in range(Z)] for i in range(Z)]
        for i, line in enumerate(comb):
            top = functools.reduce(jnp.maximum, line)
            line = [jnp.exp(value - top) for value in line]
            comb[i] = [value / total(line) + eps for value in line]
        comb = by_columns(comb, eps)

        def iterate(_, flat):
            comb = [list(flat[i * Z : (i + 1) * Z]) for i in range(Z)]
            return tuple(value for line in by_columns(by_rows(comb, eps), eps) for value in line)

        flat = lax.fori_loop(0, iterations - 1, iterate, tuple(value for line in comb for value in line))
        for m, value in enumerate(flat):
            write(2 * Z + m, value)

    flat = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows * columns,), jnp.float32),
        grid=(-(-rows // WARPGROUP),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(logits_RM.reshape(-1))
    return flat.reshape(rows, columns)


def total(values):
    """Their sum, from the left."""
    first, *rest = values
    return sum(rest, first)


def by_rows(comb, eps):
    """Divides each row by its sum plus eps."""
    return [[value / (total(line) + eps) for value in line] for line in comb]


def by_columns(comb, eps):
    """Divides each column by its sum plus eps."""
    return [list(line) for line in zip(*by_rows(list(zip(*comb, strict=True)), eps), strict=True)]
