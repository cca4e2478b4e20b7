"""Grouped matmul: tiles of rows, each times the packed weights of one expert."""

import functools

import jax
import numpy as np

from pallas_kernels import dispatch
from pallas_kernels.expert_matmul import mosaic_tpu, reference

BACKENDS = {"reference": reference.expert_matmul, "mosaic_tpu": mosaic_tpu.expert_matmul}


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format: str | None, implementation: str | None = None):
    """Multiplies each tile of rows by its expert's weights, dequantised on the way: x @ W[expert]^T.

    Args:
      x_MRD: float, M tiles of R rows, already rounded as the activation format wants.
      codes_EFD, scales_EFG: uint8 planes of E experts' weights [E, F, D]; a dense weight is one expert, a batch one
        tile.
      expert_M: i32 expert of each tile; -1: the tile is empty and no weight is read for it.
      format: "fp4_e8m0_32" or "fp8_e8m0_32x32"; None: the codes are float weights and the scales are not read.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [M, R, F], accumulated in float32; zeros for an empty tile. Differentiable in x, and in float weights.
    """
    if format is None and implementation is None:
        return reference.expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, format=None)
    return _multiply((format, implementation), x_MRD, codes_EFD, scales_EFG, expert_M)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _multiply(static, x_MRD, codes_EFD, scales_EFG, expert_M):
    format, implementation = static
    return dispatch.run(
        "expert_matmul", BACKENDS, implementation, x_MRD, codes_EFD, scales_EFG, expert_M, format=format
    )


def _forward(static, *arrays):
    return _multiply(static, *arrays), arrays


def _backward(static, arrays, cotangent_MRF):
    x_MRD, *planes = arrays
    _, pull = jax.vjp(lambda x: reference.expert_matmul(x, *planes, format=static[0]), x_MRD)
    return *pull(cotangent_MRF), *(np.zeros(plane.shape, jax.dtypes.float0) for plane in planes)


_multiply.defvjp(_forward, _backward)
