"""The Hopper kernel of gather_attention: what it serves and refuses; on a GPU, its values against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from pallas_kernels.gather_attention import mosaic_gpu

N, H, WINDOW = 64, 512, 128
FORMATS = {"window_format": "fp8_e8m0_32", "entry_format": "fp4_e4m3_16"}
ON_GPU = pytest.mark.skipif(jax.default_backend() != "gpu", reason="runs the kernel, which needs a GPU")
BF16 = 2**-7  # of the largest value: weights and the result are rounded to 8 bits, each within 2^-9 of itself
attend = functools.partial(mosaic_gpu.gather_attention, scale=H**-0.5, **FORMATS)


def shapes(B, T, W=WINDOW, K=512, P=WINDOW, S=4096, dtype=jnp.bfloat16, heads=N, channels=H):
    """Shapes of one call at the released sizes."""
    spec = jax.ShapeDtypeStruct
    window = spec((B, P, H), jnp.uint8), spec((B, P, H // 32), jnp.uint8)
    entries = spec((B, S, H // 2), jnp.uint8), spec((B, S, H // 16), jnp.uint8)
    query, sink = spec((B, T, heads, channels), dtype), spec((heads,), jnp.float32)
    return query, sink, window, spec((B, T, W), jnp.int32), entries, spec((B, T, K), jnp.int32)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("B, T, K", [(1, 1, 512), (32, 1, 512), (1, 2048, 512), (2, 130, 7)])
def test_it_lowers_for_cuda(B, T, K, x64):
    with jax.enable_x64(x64):
        exported = jax.export.export(jax.jit(attend), platforms=["cuda"])(*shapes(B, T, K=K))
    assert "mosaic_gpu" in exported.mlir_module()


def test_it_lowers_inside_scan_and_without_entries():
    query, sink, window, index, _, _ = shapes(2, 3)

    def repeat(query, *arrays):
        return jax.lax.scan(lambda q, _: (attend(q, *arrays, None, None), None), query, length=2)[0]

    assert jax.export.export(jax.jit(repeat), platforms=["cuda"])(query, sink, window, index)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": jnp.float32}, "float32"),
        ({"heads": 32}, "32 heads of 512"),
        ({"channels": 256}, "64 heads of 256"),
    ],
)
def test_it_refuses_with_numbers(change, reason):
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(attend, *shapes(1, 1, **change))


def test_it_refuses_float_rows():
    query, sink, _, index, _, _ = shapes(1, 1)
    rows = jax.ShapeDtypeStruct((1, WINDOW, H), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="format None"):
        jax.eval_shape(
            functools.partial(attend, window_format=None, entry_format=None),
            query,
            sink,
            (rows, rows),
            index,
            None,
            None,
        )


@pytest.mark.parametrize("change", [{"T": 0}, {"W": 0, "K": 0}, {"P": 0, "S": 0}])
def test_nothing_to_read_is_zero(change):
    arrays = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes(**({"B": 2, "T": 3} | change)))
    out = attend(*arrays)
    assert out.shape == arrays[0].shape and not out.any()


def packed(rng, format, rows, B):
    """Random codes and scales, and what they stand for in float64."""
    table, _, scale_format, group, _ = oracle.FORMATS[format]
    codes = rng.integers(0, len(table), (B, rows, H)).astype(np.uint8)
    if len(table) > 16:
        codes = np.where(codes & 127 > 64, codes & 0xBF, codes).astype(np.uint8)  # below 2
    low, high, scales = (124, 128, oracle.E8M0) if scale_format == "e8m0" else (0x20, 0x38, oracle.E4M3)
    bytes_ = rng.integers(low, high, (B, rows, H // group)).astype(np.uint8)
    values = table[codes].astype(np.float64) * np.repeat(scales[bytes_].astype(np.float64), group, -1)
    return (codes[..., 0::2] | codes[..., 1::2] << 4 if len(table) == 16 else codes, bytes_), values


def lists(rng, B, T, width, rows):
    """Rows for each query, often the same twice, -1 anywhere; the last query has none."""
    index = np.where(rng.random((B, T, width)) < 0.2, -1, rng.integers(0, rows, (B, T, width))).astype(np.int32)
    index[-1, -1] = -1
    return index


class Case:
    """Inputs of one call, and the rows in float64; rows that no query reads are NaN."""

    def __init__(self, B=2, T=3, W=WINDOW, K=100, P=WINDOW, S=300, sink=1.0):
        rng = np.random.default_rng(0)
        self.query = jnp.asarray(rng.standard_normal((B, T, N, H)), jnp.bfloat16)
        self.sink = (sink * rng.standard_normal(N)).astype(np.float32)
        self.window, self.rows = packed(rng, FORMATS["window_format"], P, B)
        self.window_index = self.index = lists(rng, B, T, W, P)
        self.entries = self.entry_index = None
        self.poison(self.window[1], self.window_index, 255)
        if K:
            self.entries, rows = packed(rng, FORMATS["entry_format"], S, B)
            self.entry_index = lists(rng, B, T, K, S)
            self.poison(self.entries[1], self.entry_index, 0x7F)
            self.index = np.concatenate([self.index, np.where(self.entry_index < 0, -1, self.entry_index + P)], 2)
            self.rows = np.concatenate([self.rows, rows], 1)

    def poison(self, scales, index, nan):
        for b in range(len(scales)):
            scales[b, np.setdiff1d(np.arange(scales.shape[1]), index[b])] = nan

    @property
    def arrays(self):
        arrays = self.query, self.sink, self.window, self.window_index, self.entries, self.entry_index
        return jax.tree.map(jnp.asarray, arrays)

    def expected(self):
        out = np.zeros(self.query.shape)
        for b, t in np.ndindex(out.shape[:2]):
            rows = self.rows[b, self.index[b, t][self.index[b, t] >= 0]]
            scores = np.asarray(self.query[b, t], np.float64) @ rows.T * H**-0.5
            top = np.maximum(scores.max(1, initial=-np.inf), self.sink)[:, None]
            weights = np.exp(scores - top)
            out[b, t] = weights / (weights.sum(1, keepdims=True) + np.exp(self.sink[:, None] - top)) @ rows
        return out

    def check(self, attend=attend):
        out = np.asarray(jax.jit(attend)(*self.arrays), np.float64)
        expected = self.expected()
        np.testing.assert_allclose(out, expected, rtol=0, atol=BF16 * np.abs(expected).max())
        assert not out[-1, -1].any()  # the query without rows


@ON_GPU
@pytest.mark.parametrize("B, T", [(1, 1), (3, 1), (32, 1), (1, 33), (2, 130)])
def test_values(B, T):
    Case(B, T).check()


@ON_GPU
@pytest.mark.parametrize("K", [0, 1, 7, 512, 1000])
def test_any_number_of_entries(K):
    Case(K=K).check()


@ON_GPU
@pytest.mark.parametrize("B, T, W, K", [(67, 2, 64, 60), (140, 1, 1, 1), (1, 300, 7, 0)])
def test_blocks_that_serve_several_queries(B, T, W, K):
    Case(B, T, W, K).check()


@ON_GPU
def test_windows_of_other_lengths():
    Case(W=200, P=67).check()


@ON_GPU
def test_a_dominant_sink():
    Case(sink=30.0).check()


@ON_GPU
def test_x64():
    with jax.enable_x64(True):
        Case().check()


@ON_GPU
@pytest.mark.parametrize("B, T", [(1, 1), (2, 130)])
def test_the_same_call_gives_the_same_bits(B, T):
    arrays = Case(B, T).arrays
    first, *others = (np.asarray(jax.jit(attend)(*arrays).view(jnp.uint16)) for _ in range(5))
    for other in others:
        np.testing.assert_array_equal(other, first)


@ON_GPU
def test_inside_scan():
    def twice(*arrays):
        _, outs = jax.lax.scan(lambda carry, _: (carry, attend(*arrays)), 0, length=2)
        return outs[1]

    Case().check(twice)
