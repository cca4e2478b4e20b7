"""The Hopper kernels of the scores and of the mixing weights: what they serve and refuse, lowered for CUDA everywhere.

Their values are checked on a GPU: the scores by test_kernel_scores.py, the mixing weights here.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.index_scores import index_scores
from pallas_kernels.pool_scores import pool_scores
from pallas_kernels.sinkhorn import sinkhorn

X64 = pytest.mark.parametrize("x64", [False, True])
ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs the kernel, which needs a GPU")
GPU = {"implementation": "mosaic_gpu"}
MIXING = {"streams": 4, "iterations": 20, "eps": 1e-6, "width": 64, "norm_eps": 1e-6}
ROUNDINGS = 1e-6  # some 20 divisions and sums of 4 terms around 1/4 in float32, in another order


def arrays(B, T, S, heads=32, channels=128):
    """Shapes of query, weight, codes, scales and visible."""
    kinds = ((B, T, heads, channels), jnp.bfloat16), ((B, T, heads), jnp.float32), ((B, S, channels // 2), jnp.uint8)
    kinds = *kinds, ((B, S, channels // 32), jnp.uint8), ((B, T), jnp.int32)
    return [jax.ShapeDtypeStruct(*kind) for kind in kinds]


def index(block_size=8, format="fp4_e8m0_32"):
    return jax.jit(functools.partial(index_scores, format=format, block_size=block_size, **GPU))


def lowered(fn, *shapes):
    """The program for CUDA, made on any machine."""
    return jax.export.export(fn, platforms=["cuda"])(*shapes).mlir_module()


@X64
@pytest.mark.parametrize(
    "B,T,S,block_size", [(8, 1, 2**20, 8), (32, 1, 65536, 8), (1, 2048, 65536, 1), (2, 5, 1003, 4)]
)
def test_index_scores_lower_for_cuda(B, T, S, block_size, x64):
    with jax.enable_x64(x64):
        assert "mosaic_gpu" in lowered(index(block_size), *arrays(B, T, S))


@X64
@pytest.mark.parametrize("B,T,S,C", [(1, 1, 2**20, 2048), (1, 128, 65536, 2048), (2, 3, 1003, 5)])
def test_pool_scores_lower_for_cuda(B, T, S, C, x64):
    *before, visible = arrays(B, T, S)
    block = jax.ShapeDtypeStruct((B, T, C), jnp.int32)
    with jax.enable_x64(x64):
        fn = jax.jit(functools.partial(pool_scores, format="fp4_e8m0_32", block_size=8, **GPU))
        assert "mosaic_gpu" in lowered(fn, *before, block, visible)


@pytest.mark.parametrize(
    "shapes, change, reason",
    [
        (arrays(1, 1, 9), {"format": "fp8_e8m0_32"}, "fp8_e8m0_32"),
        (arrays(1, 1, 9), {"format": None}, "None"),
        (arrays(1, 1, 9), {"block_size": 16}, "block_size=16"),
        (arrays(1, 1, 9, heads=64), {}, "64 heads of 128"),
        (arrays(1, 1, 9, channels=64), {}, "32 heads of 64"),
        (arrays(2**11, 1, 2**20), {}, "2048 x 1048576 keys"),
    ],
)
def test_they_refuse_with_numbers(shapes, change, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(index(**change), *shapes)


@X64
@pytest.mark.parametrize("rows", [1, 300])
def test_mixing_weights_lower_for_cuda(rows, x64):
    with jax.enable_x64(x64):
        fn = jax.jit(functools.partial(sinkhorn, **MIXING, **GPU))
        shapes = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 25), (3,), (24,)))
        assert "mosaic_gpu" in lowered(fn, *shapes)


def test_mixing_weights_refuse_with_numbers():
    for product, streams, reason in (
        (jnp.zeros((1, 36)), 5, "5 streams"),
        (jnp.zeros((1, 25), jnp.bfloat16), 4, "bfloat16"),
    ):
        with pytest.raises(NotImplementedError, match=reason):
            base = jnp.zeros((2 + streams) * streams)
            sinkhorn(product, jnp.ones(3), base, **MIXING | {"streams": streams}, **GPU)


@ON_GPU
@pytest.mark.parametrize("rows", [0, 1, 7, 128, 300, 4001])
def test_mixing_weights_are_the_references(rows):
    draw = jax.random.split(jax.random.key(rows), 3)
    product = jax.random.normal(draw[0], (rows, 25)) * 3
    product = product.at[:, 24].set(64 * (0.5 + jnp.abs(product[:, 24])))  # the sum of 64 squares
    arrays = product, jax.random.normal(draw[1], (3,)), jax.random.normal(draw[2], (24,))
    got = sinkhorn(*arrays, **MIXING, **GPU)
    np.testing.assert_allclose(got, sinkhorn(*arrays, **MIXING, implementation="reference"), rtol=0, atol=ROUNDINGS)
    np.testing.assert_array_equal(got, sinkhorn(*arrays, **MIXING, **GPU))
