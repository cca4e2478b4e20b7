"""Single-pass hyper-connections: mixes, collapse, expand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import vectors

from pallas_kernels.sinkhorn import sinkhorn
from v41jax import config, mhc

SINKHORN_ATOL = 1e-6  # float32: sigmoids, a softmax and 39 divisions of values up to 2
STREAM_ATOL = 2e-6  # float32: sums of five products of values up to 4
GRADIENT_RTOL = 1e-3  # of the largest float64 gradient: 39 divisions amplify float32 roundings


def split(streams=4, iterations=20, eps=1e-6):
    """Mixes of logits: products with a row whose mean square is 1."""

    def run(logits, scale, base):
        rows = jnp.pad(jnp.asarray(logits, jnp.float32).reshape(-1, base.size), ((0, 0), (0, 1)), constant_values=1)
        flat = sinkhorn(
            rows, jnp.asarray(scale), jnp.asarray(base), streams=streams, iterations=iterations, eps=eps, width=1,
            norm_eps=0.0,
        ).reshape(jnp.shape(logits))  # fmt: skip
        return mhc.split(flat, streams)

    return jax.jit(run)


@pytest.mark.parametrize("x64", [False, True])
def test_mixes_equal_the_release(x64):
    golden = vectors()
    with jax.enable_x64(x64):
        got = split()(golden["mhc.mixes"], golden["mhc.scale"], golden["mhc.base"])
    for name in ("pre", "post", "comb"):
        assert getattr(got, name).dtype == jnp.float32
        np.testing.assert_allclose(getattr(got, name), golden[f"mhc.{name}"], rtol=0, atol=SINKHORN_ATOL)


@pytest.mark.parametrize("streams,iterations,eps", [(2, 1, 1e-6), (3, 5, 1e-2), (4, 20, 1e-6), (5, 2, 1e-3)])
def test_mixes_equal_the_oracle(streams, iterations, eps):
    rng = np.random.default_rng(streams)
    logits = (rng.standard_normal((3, (2 + streams) * streams)) * 5).astype(np.float32)
    scale, base = np.array([0.5, 1, 2], np.float32), rng.standard_normal(logits.shape[-1]).astype(np.float32)
    got = split(streams, iterations, eps)(logits, scale, base)
    for t in range(3):
        want = oracle.split_mixes(logits[t], scale, base, streams, iterations, eps)
        for part, right in zip(got, want, strict=True):
            np.testing.assert_allclose(part[t], right, rtol=0, atol=SINKHORN_ATOL)


def test_twenty_iterations_stop_short_of_doubly_stochastic():
    comb = np.zeros((4, 4), np.float32)
    comb[0, 0] = comb[1, 1] = comb[2, 0] = 40
    logits = np.concatenate([np.zeros(8, np.float32), comb.ravel()])
    got = split()(logits, np.ones(3, np.float32), np.zeros(24, np.float32)).comb
    np.testing.assert_allclose(got.sum(1), [0.99944, 1.00168, 0.99944, 0.99944], rtol=0, atol=5e-6)  # printed digits
    np.testing.assert_allclose(got.sum(0), np.ones(4), rtol=0, atol=2e-6)  # eps of the last division


def comb_gradient(logits, upstream, eps=1e-6):
    """The gradient of sum(comb * upstream) in float64, by reverse mode through the iterates."""
    e = np.exp(logits - logits.max(1, keepdims=True))
    soft = e / e.sum(1, keepdims=True)
    steps, x = [], soft + eps
    for axis in [0] + [1, 0] * 19:
        steps.append((axis, x))
        x = x / (x.sum(axis, keepdims=True) + eps)
    g = upstream
    for axis, x in reversed(steps):
        total = x.sum(axis, keepdims=True) + eps
        g = g / total - (g * x).sum(axis, keepdims=True) / total**2
    return soft * (g - (g * soft).sum(1, keepdims=True))


@pytest.mark.parametrize("jit,dtype", [(False, jnp.float32), (True, jnp.float32), (True, jnp.bfloat16)])
def test_sinkhorn_gradient_is_that_of_float64(jit, dtype):
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.standard_normal((4, 4)) * 40, dtype)
    upstream = rng.standard_normal((4, 4)) * 1e4

    def loss(logits):
        wide = jnp.concatenate([jnp.zeros(8), logits.astype(jnp.float32).ravel()])
        comb = split()(wide, jnp.ones(3), jnp.zeros(24)).comb
        return (comb * upstream.astype(np.float32)).sum()

    gradient = (jax.jit(jax.grad(loss)) if jit else jax.grad(loss))(logits)
    assert gradient.dtype == dtype
    want = comb_gradient(np.asarray(logits, np.float64), upstream)
    assert np.isfinite(np.asarray(gradient, np.float32)).all()
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 0.0  # of the gradient itself
    atol = GRADIENT_RTOL * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(gradient, np.float64), want, rtol=rounding, atol=atol)


cfg = dataclasses.replace(config.tiny, hidden_size=64, quantized=False)
Z, D = cfg.hc_mult, cfg.hidden_size


def sublayer(rng):
    shapes = {name: spec.shape for name, spec in mhc.specs(cfg, "attn").items()}
    return {name: jnp.asarray(rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3])  # one is a product of its own
def test_mixes_of_streams_are_float32_under_one_norm(tokens, dtype):
    rng = np.random.default_rng(1)
    params, streams = sublayer(rng), jnp.asarray(rng.standard_normal((1, tokens, Z, D)) * 7, dtype)
    params["hc_attn_fn"] /= 16
    got = jax.jit(functools.partial(mhc.mixes, sublayer="attn", cfg=cfg))(params, streams_BTZD=streams)
    for t in range(tokens):
        flat = oracle.rms_norm(np.asarray(streams[0, t], np.float64).ravel(), np.ones(Z * D))
        logits = np.asarray(params["hc_attn_fn"], np.float64) @ flat
        want = oracle.split_mixes(logits, params["hc_attn_scale"], params["hc_attn_base"], Z, 20, 1e-6)
        for part, right in zip(got, want, strict=True):
            assert part.dtype == jnp.float32
            np.testing.assert_allclose(part[0, t], right, rtol=0, atol=4 * SINKHORN_ATOL)  # and a product of 256


def test_collapse_and_expand_equal_the_oracle():
    rng = np.random.default_rng(2)
    pre, post, comb = (rng.random(shape).astype(np.float32) for shape in ((2, 3, Z), (2, 3, Z), (2, 3, Z, Z)))
    streams, y = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, Z, D), (2, 3, D)))
    collapsed = jax.jit(mhc.collapse)(pre, streams)
    expanded = jax.jit(mhc.expand)(mhc.Mixes(pre, post, comb), y, streams)
    for at in np.ndindex(2, 3):
        np.testing.assert_allclose(collapsed[at], oracle.collapse(pre[at], streams[at]), rtol=0, atol=STREAM_ATOL)
        want = oracle.expand(post[at], comb[at], y[at], streams[at])
        np.testing.assert_allclose(expanded[at], want, rtol=0, atol=STREAM_ATOL)


def test_streams_keep_bfloat16_and_round_once():
    rng = np.random.default_rng(3)
    mix = mhc.Mixes(*(jnp.asarray(rng.random(s), jnp.float32) for s in ((1, 1, Z), (1, 1, Z), (1, 1, Z, Z))))
    streams, y = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((1, 1, Z, D), (1, 1, D)))
    wide_streams, wide_y = streams.astype(jnp.float32), y.astype(jnp.float32)
    np.testing.assert_array_equal(
        mhc.collapse(mix.pre, streams), mhc.collapse(mix.pre, wide_streams).astype(jnp.bfloat16)
    )
    np.testing.assert_array_equal(
        mhc.expand(mix, y, streams), mhc.expand(mix, wide_y, wide_streams).astype(jnp.bfloat16)
    )
    assert mhc.expand(mix, y, streams).dtype == mhc.collapse(mix.pre, streams).dtype == jnp.bfloat16


def test_specs_are_float32_and_never_quantised():
    for spec in mhc.specs(config.v41_flash, "ffn").values():
        assert (spec.format, spec.dtype) == (None, "float32")
