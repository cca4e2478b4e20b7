"""The compressor: groups, what waits, and where an entry stands."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

from v41jax import compressor, config, model, quant, rope
from v41jax.cache import EntryPool, Span

LATENT_ATOL = 3e-6  # float32: a projection of 64 channels, softmax, norm; values up to 4

cfg = dataclasses.replace(config.tiny, formats=config.UNQUANTIZED, quantized=False)
D, H = cfg.hidden_size, cfg.head_dim

quantize = jax.jit(quant.quantize, static_argnums=1)
jitted_compress = jax.jit(compressor.compress, static_argnames=("ratio", "cfg"))


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def weights(rng, ratio, dtype=jnp.float32):
    params = {"wkv": normal(rng, H, D) / 8, "wgate": normal(rng, H, D) / 4, "norm": normal(rng, H)}
    if ratio == 1:
        del params["wgate"]
    return {name: jnp.asarray(w, dtype) for name, w in params.items()}


def empty_pool(batch, ratio, entries=16):
    planes = [quantize(jnp.zeros((batch, entries, n)), None) for n in (H, cfg.index_head_dim)]
    return EntryPool(*planes, *[jnp.zeros((batch, ratio - 1, H), jnp.float32)] * 2, jnp.zeros((batch,), jnp.int32))


def compress(params, x, pool, start, length, ratio):
    span = Span(jnp.asarray(start, jnp.int32), jnp.asarray(length, jnp.int32), x.shape[1])
    return jitted_compress(params, x, pool, span=span, ratio=ratio, cfg=cfg)


def latents_oracle(params, x, ratio):
    """All complete groups of one sequence."""
    p = {name: np.asarray(w, np.float64) for name, w in params.items()}
    out = []
    for g in range(len(x) // ratio):
        tokens = x[g * ratio : (g + 1) * ratio].astype(np.float64)
        kv = np.stack([p["wkv"] @ token for token in tokens])
        gate = np.stack([p["wgate"] @ token for token in tokens]) if ratio > 1 else np.zeros_like(kv)
        out.append(oracle.rms_norm(oracle.pool_group(kv, gate), p["norm"]))
    return np.array(out).reshape(-1, H)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
@pytest.mark.parametrize("x64", [False, True])
def test_latents_equal_the_oracle_at_every_length(ratio, x64):
    rng = np.random.default_rng(ratio)
    lengths = np.array([0, ratio - 1, ratio, ratio + 1, 3 * ratio + 1, 13])
    x, params = normal(rng, len(lengths), 13, D), weights(rng, ratio)
    with jax.enable_x64(x64):
        latent, count, _ = compress(params, x, empty_pool(len(lengths), ratio), 0 * lengths, lengths, ratio)
        assert latent.dtype == jnp.float32
        assert count.dtype == jnp.int32
    np.testing.assert_array_equal(count, lengths // ratio)
    for b, length in enumerate(lengths):
        want = latents_oracle(params, x[b, :length], ratio)
        np.testing.assert_allclose(latent[b, : len(want)], want, rtol=0, atol=LATENT_ATOL)


def feed(params, x, split, ratio):
    """The latents of one sequence fed in chunks of `split` tokens, and the pool afterwards."""
    pool, start, out = empty_pool(1, ratio), 0, []
    for size in split:
        latent, count, pool = compress(params, x[None, start : start + size], pool, [start], [size], ratio)
        out.append(np.asarray(latent[0, : int(count[0])]))
        start += size
    return np.concatenate(out), pool


@pytest.mark.parametrize("ratio", [2, 5])
@pytest.mark.parametrize("split", [(16, 7), (7, 16), (1,) * 23, (1, 22), (22, 1)])
def test_any_split_of_a_prompt_makes_the_same_entries(ratio, split):
    rng = np.random.default_rng(5)
    x, params = normal(rng, 23, D), weights(rng, ratio)
    (whole, kept), (parts, left) = feed(params, x, (23,), ratio), feed(params, x, split, ratio)
    np.testing.assert_allclose(parts, whole, rtol=0, atol=LATENT_ATOL)
    for name in ("partial_kv", "partial_gate"):
        waiting = 23 % ratio
        np.testing.assert_allclose(getattr(left, name), getattr(kept, name), rtol=0, atol=LATENT_ATOL)
        np.testing.assert_array_equal(getattr(left, name)[:, waiting:], 0)
        assert (np.asarray(getattr(left, name)[:, :waiting]) != 0).all()


def test_padding_is_never_pooled():
    rng = np.random.default_rng(6)
    x, params = normal(rng, 2, 8, D), weights(rng, 2)
    other = x.copy()
    other[0, 5:] = 1e3
    results = [compress(params, x, empty_pool(2, 2), [0, 0], [5, 8], 2) for x in (x, other)]
    for latent, count, pool in results:
        np.testing.assert_array_equal(count, [2, 4])
        np.testing.assert_array_equal(latent[0, :2], results[0][0][0, :2])
        np.testing.assert_array_equal(pool.partial_kv, results[0][2].partial_kv)
    alone = compress(params, x[:1, :5], empty_pool(1, 2), [0], [5], 2)
    np.testing.assert_allclose(results[0][0][0, :2], alone[0][0, :2], rtol=0, atol=LATENT_ATOL)
    np.testing.assert_allclose(results[0][2].partial_kv[:1], alone[2].partial_kv, rtol=0, atol=LATENT_ATOL)


def test_a_row_without_tokens_keeps_what_waits():
    rng = np.random.default_rng(7)
    params, x = weights(rng, 3), normal(rng, 1, 4, D)
    _, _, pool = compress(params, x, empty_pool(1, 3), [0], [2], 3)
    _, count, after = compress(params, x, pool, [2], [0], 3)
    assert count[0] == 0
    np.testing.assert_array_equal(after.partial_kv, pool.partial_kv)
    np.testing.assert_array_equal(after.partial_gate, pool.partial_gate)


def test_large_gates_do_not_overflow():
    params = {"wkv": jnp.ones((H, D)), "wgate": jnp.full((H, D), 100.0), "norm": jnp.ones(H)}
    x = np.concatenate([np.full((1, 1, D), 1.0), np.full((1, 1, D), -2.0)], axis=1).astype(np.float32)
    latent, _, _ = compress(params, x, empty_pool(1, 2), [0], [2], 2)
    np.testing.assert_allclose(latent, np.ones((1, 1, H)), rtol=0, atol=LATENT_ATOL)


def test_bfloat16_is_pooled_in_float32():
    rng = np.random.default_rng(8)
    params, x = weights(rng, 2, jnp.bfloat16), jnp.asarray(normal(rng, 1, 5, D), jnp.bfloat16)
    latent, _, pool = compress(params, x, empty_pool(1, 2), [0], [5], 2)
    assert latent.dtype == jnp.bfloat16
    assert pool.partial_kv.dtype == pool.partial_gate.dtype == jnp.float32
    want = latents_oracle(params, np.asarray(x[0], np.float32), 2)
    np.testing.assert_allclose(latent[0, :2].astype(jnp.float32), want, rtol=2.0**-8, atol=LATENT_ATOL)  # one rounding


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_an_entry_stands_at_the_first_token_of_its_group(ratio):
    rng = np.random.default_rng(9)
    layer = dataclasses.replace(config.layer_plan(cfg)[1], ratio=ratio, engram=None)
    params = {"compressor": weights(rng, ratio), "indexer": {"wk": normal(rng, 32, H), "k_norm": normal(rng, 32)}}
    x = normal(rng, 1, 11, D)
    streams = np.stack([x] * cfg.hc_mult, axis=2)
    pre = np.zeros((1, 11, cfg.hc_mult), np.float32)
    pre[..., 0] = 1
    pool = empty_pool(1, ratio)

    @jax.jit
    def append(streams, pre, pool, span):
        flow = model.Flow(streams, pre, None, ())
        both = {"attn_norm": jnp.ones(D), "attn": params}
        return model.append(both, flow, pool, span=span, layer=layer, cfg=cfg)

    for start, stop in ((0, 4), (4, 11)):
        span = Span(jnp.array([start], jnp.int32), jnp.array([stop - start], jnp.int32), stop - start)
        pool = append(streams[:, start:stop], pre[:, start:stop], pool, span)
    frequency = rope.layer_frequencies(cfg, compressed=True)
    normed = np.stack([oracle.rms_norm(token, np.ones(D)) for token in x[0]])
    latents = latents_oracle(params["compressor"], normed, ratio)
    for j, latent in enumerate(latents):
        key = oracle.rms_norm(params["indexer"]["wk"] @ latent, params["indexer"]["k_norm"])
        entry, key = (oracle.rotate(v, j * ratio, frequency) for v in (latent, key))
        np.testing.assert_allclose(pool.entries.codes[0, j], entry, rtol=0, atol=LATENT_ATOL)
        np.testing.assert_allclose(pool.keys.codes[0, j], key, rtol=0, atol=2 * LATENT_ATOL)
    np.testing.assert_array_equal(pool.entries.codes[0, len(latents) :], 0)


def test_specs_stay_in_high_precision():
    for layer in config.layer_plan(config.v41_flash):
        if layer.role is config.Role.FULL:
            specs = compressor.specs(config.v41_flash, layer)
            assert set(specs) == ({"wkv", "wgate", "norm"} if layer.ratio > 1 else {"wkv", "norm"})
            assert not any(spec.format for spec in specs.values())
