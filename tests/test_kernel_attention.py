"""pallas_kernels.gather_attention: its backends and its backward pass against float64 loops."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.gather_attention import gather_attention, reference

X64 = pytest.mark.parametrize("x64", [False, True])
F32 = dict(rtol=2e-5, atol=2e-5)  # float32 sums of some 50 terms near 1, in another order
BF16 = 0.02  # weights, their gradients and the result rounded to 8 bits
FINITE = 2e-2  # float32 differences over 2e-3
FORMATS = {"window_format": "fp8_e8m0_32", "entry_format": "fp4_e4m3_16"}


def packed(rng, format, *shape):
    """Random codes and scales near 1 of [..., H], and what they stand for in float64."""
    table, _, scale_format, group, _ = oracle.FORMATS[format]
    codes = rng.integers(0, len(table), shape).astype(np.uint8)
    if format.startswith("fp8"):
        codes = np.where((codes & 127) > 64, codes & 0xBF, codes).astype(np.uint8)  # below 2
    low, high, scales = (124, 128, oracle.E8M0) if scale_format == "e8m0" else (0x20, 0x38, oracle.E4M3)
    bytes_ = rng.integers(low, high, (*shape[:-1], shape[-1] // group)).astype(np.uint8)
    values = table[codes].astype(np.float64) * np.repeat(scales[bytes_].astype(np.float64), group, -1)
    return (oracle.pack(codes) if len(table) == 16 else codes, bytes_), values


def lists(rng, B, T, width, rows, absent=0.2):
    """Distinct rows for each query while there are enough, -1 anywhere; the first query has none."""
    index = np.stack([rng.permutation(max(rows, width))[:width] for _ in range(B * T)]).reshape(B, T, width) % rows
    index = np.where(rng.random(index.shape) < absent, -1, index).astype(np.int32)
    index[0, 0] = -1
    return index


class Case:
    """Inputs of one call, and the rows in float64; every row that no query reads is poisoned with NaN."""

    def __init__(self, seed, B=2, T=3, N=4, H=32, P=9, W=7, S=20, K=11, dtype=np.float32, sink=1.0):
        rng = np.random.default_rng(seed)
        self.scale = H**-0.5
        self.query = jnp.asarray(rng.standard_normal((B, T, N, H)), dtype)
        self.sink = (sink * rng.standard_normal(N)).astype(np.float32)
        self.cotangent = jnp.asarray(rng.standard_normal((B, T, N, H)), dtype)
        self.window, self.window_rows = packed(rng, "fp8_e8m0_32", B, P, H)
        self.window_index = lists(rng, B, T, W, P)
        self.entries = self.entry_index = None
        self.entry_rows = np.zeros((B, 0, H))
        if S:
            self.entries, self.entry_rows = packed(rng, "fp4_e4m3_16", B, S, H)
            self.entry_index = lists(rng, B, T, K, S)
            self.poison(self.entries[1], self.entry_index, 0x7F)
        self.poison(self.window[1], self.window_index, 255)

    def poison(self, scales, index, nan):
        for b, row in np.ndindex(scales.shape[:2]):
            if row not in index[b]:
                scales[b, row] = nan

    @property
    def arrays(self):
        arrays = self.query, self.sink, self.window, self.window_index, self.entries, self.entry_index
        return jax.tree.map(jnp.asarray, arrays)

    @property
    def formats(self):
        return {"scale": self.scale, **FORMATS, "entry_format": None if self.entries is None else "fp4_e4m3_16"}

    def rows(self, b, t):
        """Where the rows of one query are: (plane, row), once for each time they are listed."""
        found = [(0, i) for i in self.window_index[b, t] if i >= 0]
        return found + ([] if self.entries is None else [(1, i) for i in self.entry_index[b, t] if i >= 0])

    def expected(self):
        query, planes = np.asarray(self.query, np.float64), (self.window_rows, self.entry_rows)
        out = np.zeros(query.shape)
        for b, t in np.ndindex(query.shape[:2]):
            out[b, t] = oracle.sink_attention(
                query[b, t], [planes[p][b, i] for p, i in self.rows(b, t)], self.sink, self.scale
            )
        return out

    def expected_gradients(self):
        """Of sum(out * cotangent): in query, sink, window rows and entry rows, one head and row at a time."""
        query, cotangent = np.asarray(self.query, np.float64), np.asarray(self.cotangent, np.float64)
        planes = self.window_rows, self.entry_rows
        d_query, d_sink, d_planes = (
            np.zeros(query.shape),
            np.zeros(self.sink.shape),
            [np.zeros(p.shape) for p in planes],
        )
        for b, t, n in np.ndindex(query.shape[:3]):
            q, g, where = query[b, t, n], cotangent[b, t, n], self.rows(b, t)
            terms = [np.exp(self.scale * (q @ planes[p][b, i])) for p, i in where]
            total = sum(terms) + np.exp(float(self.sink[n]))
            mean = sum(e / total * (g @ planes[p][b, i]) for e, (p, i) in zip(terms, where, strict=True))
            for e, (p, i) in zip(terms, where, strict=True):
                d_score = self.scale * e / total * (g @ planes[p][b, i] - mean)
                d_query[b, t, n] += d_score * planes[p][b, i]
                d_planes[p][b, i] += d_score * q + e / total * g
            d_sink[n] -= np.exp(float(self.sink[n])) / total * mean
        return d_query, d_sink, *d_planes


def attend(case, **how):
    return jax.jit(lambda *a: gather_attention(*a, **case.formats, **how))(*case.arrays)


def gradients(case, dtype=jnp.float32, **how):
    """In query, sink, window latents and entry latents."""
    shapes = [case.window_rows.shape, case.entry_rows.shape]
    latents = [jnp.zeros(shape, dtype) for shape in shapes]

    def loss(query, sink, *latents):
        latents = latents if case.entries is not None else (latents[0], None)
        out = gather_attention(query, sink, *case.arrays[2:], tuple(latents), **case.formats, **how)
        return (out.astype(jnp.float32) * case.cotangent.astype(jnp.float32)).sum()

    return jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(case.query, case.sink, *latents)


SIZES = [dict(), dict(B=1, T=1), dict(B=3, T=33), dict(S=0), dict(W=5, P=1, K=30, S=4), dict(T=65, B=1, N=1)]


@X64
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_reference_is_the_definition(sizes, x64):
    case = Case(0, **sizes)
    with jax.enable_x64(x64):
        got = attend(case, implementation="reference")
    assert got.dtype == jnp.float32
    assert not np.asarray(got)[0, 0].any()
    np.testing.assert_allclose(got, case.expected(), **F32)


@X64
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_are_those_of_the_definition(sizes, x64):
    case = Case(1, **sizes)
    with jax.enable_x64(x64):
        got = gradients(case)
    for a, b in zip(got, case.expected_gradients(), strict=True):
        np.testing.assert_allclose(a, b, **F32)


@pytest.mark.parametrize("sizes", [dict(), dict(T=33, B=1), dict(S=0)], ids=str)
def test_gradients_in_bfloat16_are_near_those_of_the_definition(sizes):
    case = Case(2, dtype=jnp.bfloat16, **sizes)
    got = gradients(case, jnp.bfloat16)
    assert [g.dtype for g in got] == [jnp.bfloat16, jnp.float32, jnp.bfloat16, jnp.bfloat16]
    for a, b in zip(got, case.expected_gradients(), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=BF16, atol=BF16 * np.abs(b).max(initial=1))


def test_gradients_are_finite_differences():
    """Of plain float rows, whose own gradient stands for that of the latents."""
    case = Case(3, N=2, H=32)
    planes = [jnp.asarray(np.nan_to_num(r), jnp.float32) for r in (case.window_rows, case.entry_rows)]
    scales = [jnp.zeros((*r.shape[:2], 0), jnp.uint8) for r in planes]

    @jax.jit
    def loss(query, sink, window, entries):
        out = gather_attention(
            query, sink, (window, scales[0]), case.window_index, (entries, scales[1]), case.entry_index,
            scale=case.scale, window_format=None,
        )  # fmt: skip
        return (out * case.cotangent).sum()

    at = [case.query, jnp.asarray(case.sink), *planes]
    got, rng = jax.grad(loss, argnums=(0, 1, 2, 3))(*at), np.random.default_rng(0)
    for i, gradient in enumerate(got):
        way = rng.choice(np.array([-1, 1], np.float32), at[i].shape)
        up, down = (loss(*at[:i], at[i] + way * step, *at[i + 1 :]) for step in (1e-3, -1e-3))
        np.testing.assert_allclose((up - down) / 2e-3, (gradient * way).sum(), rtol=FINITE, atol=FINITE)


def test_plain_rows_get_the_gradient_unless_latents_do():
    case = Case(4, S=0)
    rows = jnp.asarray(np.nan_to_num(case.window_rows), jnp.float32)
    arrays = case.query, case.sink, jnp.zeros((*rows.shape[:2], 0), jnp.uint8), case.window_index

    @jax.jit
    def loss(rows, latents):
        query, sink, scales, index = arrays
        how = {"scale": case.scale, "window_format": None}
        return (gather_attention(query, sink, (rows, scales), index, latents=(latents, None), **how) ** 2).sum()

    alone = jax.grad(loss)(rows, None)
    of_rows, of_latents = jax.grad(loss, argnums=(0, 1))(rows, rows)
    assert np.asarray(alone).any() and not np.asarray(of_rows).any()
    np.testing.assert_array_equal(alone, of_latents)


def test_gradients_are_the_same_bits_each_time_and_under_checkpoint_scan_and_vmap(monkeypatch):
    monkeypatch.setattr(reference, "fitting", lambda nbytes: 32)  # two blocks of queries
    case = Case(5, T=40)
    latents = jnp.zeros(case.window_rows.shape), jnp.zeros(case.entry_rows.shape)

    def loss(query, latents, row=lambda a: a):
        arrays = jax.tree.map(row, case.arrays[2:])
        out = gather_attention(query, case.sink, *arrays, latents, **case.formats)
        return (out * row(case.cotangent)).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)))
    once = grad(case.query, latents)
    jax.tree.map(np.testing.assert_array_equal, grad(case.query, latents), once)
    again = jax.jit(jax.grad(jax.checkpoint(loss), argnums=(0, 1)))(case.query, latents)
    jax.tree.map(np.testing.assert_array_equal, again, once)

    def step(total, _):
        return jax.tree.map(jnp.add, total, jax.grad(jax.checkpoint(loss), argnums=(0, 1))(case.query, latents)), None

    zeros = jax.tree.map(jnp.zeros_like, (case.query, latents))
    scanned = jax.jit(lambda: jax.lax.scan(step, zeros, None, length=2)[0])()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, 2 * b, **F32), scanned, once)

    def of_one(query, latents, window, window_index, entries, entry_index, cotangent):
        def loss(query, latents):
            one = jax.tree.map(lambda a: a[None], (window, window_index, entries, entry_index, latents))
            return (gather_attention(query[None], case.sink, *one, **case.formats)[0] * cotangent).sum()

        return jax.grad(loss, argnums=(0, 1))(query, latents)

    mapped = jax.jit(jax.vmap(of_one))(case.query, latents, *case.arrays[2:], case.cotangent)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **F32), mapped, once)


def test_a_repeated_row_counts_twice():
    case = Case(6, B=1, T=2, S=0, W=4, P=3)
    case.window_index[0, 1] = [2, -1, 2, 2]
    case.window[1][0, 2] = 127
    rows = case.window_rows[0, 2] = oracle.E4M3[case.window[0][0, 2]]
    out = attend(case)
    scores = case.scale * np.asarray(case.query, np.float64)[0, 1] @ rows
    share = 3 * np.exp(scores) / (3 * np.exp(scores) + np.exp(case.sink))
    np.testing.assert_allclose(out[0, 1], share[:, None] * rows, **F32)
    for a, b in zip(gradients(case), case.expected_gradients(), strict=True):
        np.testing.assert_allclose(a, b, **F32)


@pytest.mark.parametrize("sink", [1e4, -1e4])
def test_a_sink_takes_all_or_nothing(sink):
    case = Case(7)
    case.sink = np.full_like(case.sink, sink)
    out = np.asarray(attend(case))
    assert np.isfinite(out).all()
    if sink > 0:
        assert not out.any()
    else:
        case.sink = np.full_like(case.sink, -100)  # as good as none in float64 too
        np.testing.assert_allclose(out, case.expected(), **F32)
    assert all(np.isfinite(g).all() for g in gradients(case))


def test_order_of_ids_changes_only_rounding():
    case = Case(8)
    once = attend(case)
    case.window_index, case.entry_index = case.window_index[..., ::-1], case.entry_index[..., ::-1]
    np.testing.assert_allclose(attend(case), once, **F32)


# ---- the TPU kernel, interpreted: it takes seconds for 128 ids


def kernel(case):
    with pltpu.force_tpu_interpret_mode():
        return attend(case, implementation="mosaic_tpu")


TPU = dict(N=8, H=512)


@pytest.mark.parametrize(
    "dtype,x64,sizes",
    [(jnp.float32, False, dict(B=1, T=3, S=70, K=90)), (jnp.bfloat16, True, dict(B=2, T=1, S=150, K=130))],
    ids=["float32", "bfloat16-x64"],
)
def test_tpu_kernel_is_the_definition(dtype, x64, sizes):
    """Ids beyond one chunk, repeats, NaN beside what counts, a query with no row, entries that fill no tile."""
    case = Case(9, P=9, W=11, dtype=dtype, **sizes, **TPU)
    with jax.enable_x64(x64):
        got = kernel(case)
    assert got.dtype == dtype
    assert not np.asarray(got, np.float32)[0, 0].any()
    bound = F32 if dtype == jnp.float32 else dict(rtol=BF16, atol=BF16)
    np.testing.assert_allclose(np.asarray(got, np.float64), case.expected(), **bound)


@pytest.mark.parametrize("sizes", [dict(B=3, T=1, P=1, W=1), dict(B=1, T=5, P=131, W=20)], ids=str)
def test_tpu_kernel_without_entries_is_the_definition(sizes):
    case = Case(10, S=0, **sizes, **TPU)
    np.testing.assert_allclose(kernel(case), case.expected(), **F32)


def test_tpu_kernel_gives_the_same_bits_each_time_in_a_scan():
    case = Case(11, B=1, T=2, S=0, W=5, **TPU)

    def step(carry, _):
        return carry, gather_attention(*case.arrays, **case.formats, implementation="mosaic_tpu")

    with pltpu.force_tpu_interpret_mode():
        first, second = jax.jit(lambda: jax.lax.scan(step, None, None, length=2)[1])()
    np.testing.assert_array_equal(first, second)
    np.testing.assert_allclose(first, case.expected(), **F32)


@pytest.mark.parametrize(
    "change",
    [
        dict(H=256),
        dict(N=4),
        dict(P=8193),
        dict(W=4097),
        dict(S=2**14 + 1),
        dict(T=0),
    ],
    ids=str,
)
def test_tpu_kernel_refuses_what_it_cannot_serve(change):
    sizes = dict(B=1, T=1, N=8, H=512, P=9, W=7, S=20, K=11) | change
    B, T, N, H, P, W, S, K = (sizes[k] for k in "BTNHPWSK")
    shapes = [
        ((B, T, N, H), jnp.float32), ((N,), jnp.float32), ((B, P, H), jnp.uint8), ((B, P, H // 32), jnp.uint8),
        ((B, T, W), jnp.int32), ((B, S, H // 2), jnp.uint8), ((B, S, H // 16), jnp.uint8), ((B, T, K), jnp.int32),
    ]  # fmt: skip

    def run(query, sink, codes, scales, index, *entries):
        return gather_attention(
            query, sink, (codes, scales), index, entries[:2], entries[2], scale=1.0, **FORMATS,
            implementation="mosaic_tpu",
        )  # fmt: skip

    with pytest.raises(NotImplementedError, match=r"\d"):
        jax.eval_shape(run, *(jax.ShapeDtypeStruct(*s) for s in shapes))
