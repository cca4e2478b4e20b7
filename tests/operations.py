"""One small call of every operation, of shapes that every kernel serves."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import (
    block_max,
    expert_matmul,
    gather_attention,
    index_scores,
    masked_topk,
    pool_scores,
    quantize,
    sinkhorn,
)

ROWS = 4  # of the leading axis, which vmap maps, scan walks and a mesh shards
KERNEL_MARK = {"tpu": "tpu_custom_call", "cuda": "mosaic_gpu"}  # what a lowered kernel is called


@dataclasses.dataclass(frozen=True)
class Operation:
    """A door, arrays for it, and which of them have the leading axis."""

    name: str
    door: Callable
    backends: dict
    arrays: tuple
    has_rows: tuple
    exact: bool  # no sum, so that jit and its fusions change no bit

    @property
    def rows(self):
        """The arrays in ROWS parts of one row each, and those without rows as they are."""
        return tuple(
            jax.tree.map(lambda a: a[:, None], a) if r else a for a, r in zip(self.arrays, self.has_rows, strict=True)
        )

    def row(self, i):
        """Arrays of one row, the leading axis kept."""
        return [jax.tree.map(lambda a: a[i], a) if r else a for a, r in zip(self.rows, self.has_rows, strict=True)]

    @property
    def refused(self):
        """Arrays and static arguments that no kernel serves: float16, and for what reads any float another format."""
        first, *rest = self.arrays
        first = first if first.dtype == jnp.uint8 else first.astype(jnp.float16)
        static = {
            "dequantize": {"dtype": jnp.float16},
            "index_scores": {"format": None},
            "pool_scores": {"format": None},
        }
        return (first, *rest), static.get(self.name, {})

    @property
    def axes(self):
        return tuple(0 if r else None for r in self.has_rows)


def _planes(rng, rows, group_bytes, groups):
    """Codes and scales of random values: any codes, scales near 1 in either scale format."""
    codes = rng.integers(0, 120, (*rows, groups * group_bytes)).astype(np.uint8)
    return codes, rng.integers(50, 60, (*rows, groups)).astype(np.uint8)


def operations() -> dict[str, Operation]:
    """Every operation by name."""
    rng = np.random.default_rng(0)
    B, T, S, heads, J = ROWS, 2, 512, 32, 128

    def normal(*shape, dtype=np.float32):
        return rng.standard_normal(shape).astype(dtype)

    bf16 = ml_dtypes.bfloat16
    visible = rng.integers(1, S + 1, (B, T)).astype(np.int32)
    query, weight = rng.choice([0, 0.5, 1, -2, 3], (B, T, heads, J)).astype(bf16), normal(B, T, heads)
    keys = _planes(rng, (B, S), 16, J // 32)
    keys = keys[0], rng.integers(122, 131, keys[1].shape).astype(np.uint8)
    block = rng.integers(-1, S // 8, (B, T, 16)).astype(np.int32)
    scores = np.where(rng.random((B, T, S)) < 0.1, np.nan, rng.choice([-1, -0.0, 0.0, 0.5, 2], (B, T, S)))
    scores = scores.astype(np.float32)
    one_zero = np.where(scores == 0, np.float32(0), scores)  # of zeros of both signs a maximum takes either

    N, H = 64, 512
    window = _planes(rng, (B, 128), 32, H // 32)
    window = window[0], rng.integers(122, 126, window[1].shape).astype(np.uint8)
    entries = _planes(rng, (B, S), 8, H // 16)
    attend = functools.partial(
        gather_attention.gather_attention, scale=H**-0.5, window_format="fp8_e8m0_32", entry_format="fp4_e4m3_16"
    )
    attended = (
        normal(B, T, N, H, dtype=bf16), normal(N), window, rng.integers(-1, 128, (B, T, 64)).astype(np.int32), entries,
        rng.integers(-1, S, (B, T, 64)).astype(np.int32),
    )  # fmt: skip

    E, F, D = 3, 128, 256
    weights = rng.integers(0, 256, (E, F, D // 2)).astype(np.uint8), rng.integers(122, 131, (E, F, D // 32))
    tiles = normal(B, 8, D, dtype=bf16), weights[0], weights[1].astype(np.uint8), np.array([2, -1, 0, 2], np.int32)

    values = normal(B, 256, H, dtype=bf16)
    packed = quantize.quantize(jnp.asarray(values), format="fp4_e4m3_16", implementation="reference")
    packed = tuple(np.asarray(plane) for plane in packed)

    def call(door, **static):
        return functools.partial(door, **static)

    every, index = [True], {"format": "fp4_e8m0_32", "block_size": 8}
    table = [
        ("block_max", call(block_max.block_max, block_size=8), block_max.BACKENDS,
         (one_zero, visible), every * 2, True),
        ("masked_topk", call(masked_topk.masked_topk, k=8), masked_topk.BACKENDS, (scores, visible), every * 2, True),
        ("quantize", call(quantize.quantize, format="fp4_e4m3_16"), quantize.QUANTIZE, (values,), every, True),
        ("dequantize", call(quantize.dequantize, format="fp4_e4m3_16", dtype=jnp.bfloat16), quantize.DEQUANTIZE,
         packed, every * 2, True),
        ("index_scores", call(index_scores.index_scores, **index), index_scores.BACKENDS,
         (query, weight, *keys, visible), every * 5, False),
        ("pool_scores", call(pool_scores.pool_scores, **index), pool_scores.BACKENDS,
         (query, weight, *keys, block, visible), every * 6, False),
        ("gather_attention", attend, gather_attention.BACKENDS, attended, [True, False, *every * 4], False),
        ("expert_matmul", call(expert_matmul.expert_matmul, format="fp4_e8m0_32"), expert_matmul.BACKENDS, tiles,
         [True, False, False, True], False),
        ("sinkhorn", call(sinkhorn.sinkhorn, streams=4, iterations=20, eps=1e-6, width=64, norm_eps=1e-6),
         sinkhorn.BACKENDS, (jnp.abs(normal(B, 25)) * 4, normal(3), normal(24)), [True, False, False], False),
    ]  # fmt: skip
    return {name: Operation(name, d, b, jax.tree.map(jnp.asarray, a), tuple(r), e) for name, d, b, a, r, e in table}
