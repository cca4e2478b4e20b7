"""Mixing weights on a GPU: a thread holds one row's M logits in registers and does all iterations there.

As separate XLA operations the iterations are three launches each, some 60 for one call, and launches are what a decode
step waits for; so the norm, scale and base of the logits are here too. Bytes: 2 M floats a row. Some 2 Z Z divisions an
iteration; about 2 us whatever the rows, up to the chip's number of threads.
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


def sinkhorn(product_RP, scale, base_M, *, streams: int, iterations: int, eps: float, width: int, norm_eps: float):
    """See the contract."""
    Z, rows, columns = streams, product_RP.shape[0], base_M.shape[0]
    if Z > MOST_STREAMS:
        raise NotImplementedError(f"{Z} streams; {MOST_STREAMS} at most fit in a thread's registers")
    for array in (product_RP, scale, base_M):
        if array.dtype != jnp.float32:
            raise NotImplementedError(f"an array is {array.dtype.name}; this kernel reads float32")
    if rows == 0:
        return product_RP[:, :columns]
    eps, norm_eps, share = (np.float32(x) for x in (eps, norm_eps, 1 / width))  # jax arrays would become operands

    def body(product_gmem, scale_gmem, base_gmem, out_gmem):
        row = lax.axis_index("block") * WARPGROUP + lanes.lanewise(lambda: [mgpu.thread_idx()], returns=1)

        def read(ref, index):
            return lax.bitcast_convert_type(lanes.load(ref, index, "each"), jnp.float32)

        def product(m):
            return read(product_gmem, jnp.where(row < rows, row * (columns + 1) + m, -1))

        inverse = lax.rsqrt(product(columns) * share + norm_eps)
        scales = [read(scale_gmem, jnp.full_like(row, kind)) for kind in range(3)]

        def column(m):
            return product(m) * inverse * scales[min(m // Z, 2)] + read(base_gmem, jnp.full_like(row, m))

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
    )(product_RP.reshape(-1), scale, base_M)
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
