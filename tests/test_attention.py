"""Attention over window and entries: sink, rotation, grouped output."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import vectors
from jaxprs import equations

from pallas_kernels.gather_attention import reference
from v41jax import attention, config, quant, rope
from v41jax.cache import Span

ATTEND_ATOL = 4e-6  # float32: three projections, softmax and norm, of values up to 4
SINK_ATOL = 1e-6  # float32: dot products of 64, one softmax, a sum of 12 rows

cfg = dataclasses.replace(config.tiny, formats=config.UNQUANTIZED, quantized=False)
N, H, W = cfg.num_attention_heads, cfg.head_dim, cfg.sliding_window
FREQUENCY = rope.layer_frequencies(cfg, compressed=False)
quantize = jax.jit(quant.quantize, static_argnums=1)
sink_attention = jax.jit(reference.sink_attention, static_argnames="scale")


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


# ---- sink attention


@pytest.mark.parametrize("x64", [False, True])
def test_sink_attention_equals_the_release(x64):
    golden = vectors()
    q, kv, index, sink = (golden[f"attention.{name}"] for name in ("q", "kv", "index", "sink"))
    rows = np.stack([kv[b][np.maximum(index[b], 0)] for b in range(2)])
    with jax.enable_x64(x64):
        out = sink_attention(q, rows, index >= 0, sink, scale=64**-0.5)
    assert out.dtype == jnp.float32
    np.testing.assert_allclose(out, golden["attention.out"], rtol=0, atol=SINK_ATOL)


def test_sink_attention_equals_the_oracle():
    rng = np.random.default_rng(0)
    q, rows, valid, sink = (
        normal(rng, 1, 5, 3, 16),
        normal(rng, 1, 5, 7, 16),
        rng.random((1, 5, 7)) < 0.6,
        normal(rng, 3),
    )
    out = sink_attention(q, rows, valid, sink, scale=0.25)
    for t in range(5):
        want = oracle.sink_attention(q[0, t], rows[0, t][valid[0, t]], sink, 0.25)
        np.testing.assert_allclose(out[0, t], want, rtol=0, atol=SINK_ATOL)


@pytest.mark.parametrize("sink", [-1e4, 0.0, 80.0])
def test_a_query_without_rows_gets_zeros(sink):
    out = sink_attention(np.ones((1, 1, 2, 8)), np.ones((1, 1, 3, 8)), np.zeros((1, 1, 3), bool),
                         np.full(2, sink, np.float32), scale=1.0)  # fmt: skip
    np.testing.assert_array_equal(out, np.zeros((1, 1, 2, 8)))


def test_the_sink_takes_its_share_of_one_row():
    out = sink_attention(np.zeros((1, 1, 1, 8), np.float32), np.ones((1, 1, 1, 8), np.float32),
                         np.ones((1, 1, 1), bool), np.zeros(1, np.float32), scale=1.0)  # fmt: skip
    np.testing.assert_array_equal(out, np.full((1, 1, 1, 8), 0.5))


def test_what_stands_in_rows_that_do_not_count_changes_no_bit():
    rng = np.random.default_rng(1)
    q, rows, valid, sink = (
        normal(rng, 1, 4, 2, 16),
        normal(rng, 1, 4, 6, 16),
        rng.random((1, 4, 6)) < 0.5,
        normal(rng, 2),
    )
    other = np.where(valid[..., None], rows, np.float32(1e6))
    np.testing.assert_array_equal(*(sink_attention(q, r, valid, sink, scale=0.25) for r in (rows, other)))


def test_gradients_of_a_query_without_rows_are_finite():
    q, rows, sink = jnp.ones((1, 2, 2, 8)), jnp.ones((1, 2, 3, 8)), jnp.zeros(2)
    valid = jnp.array([[[False] * 3, [True] * 3]])
    loss = lambda *a: reference.sink_attention(*a[:2], valid, a[2], scale=0.5).sum()  # noqa: E731
    for gradient in jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, rows, sink):
        assert np.isfinite(gradient).all()


def test_the_scale_has_no_default():
    with pytest.raises(TypeError, match="scale"):
        reference.sink_attention(*[jnp.ones((1, 1, 1, 1))] * 4)


# ---- a layer


def layer(rng, *, tokens=6, entries=9, selected=3, dtype=jnp.float32):
    """Parameters and arguments of one call: row 0 has 11 tokens behind it, row 1 three, row 2 none."""
    shapes = {name: spec.shape for name, spec in attention.specs(cfg).items()}
    params = {name: normal(rng, *shape) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    params |= {"attn_sink": normal(rng, N), "kv_norm": normal(rng, H), "q_norm": normal(rng, cfg.q_lora_rank)}
    start = np.array([11, 3, 0], np.int32)
    span = Span(jnp.asarray(start), jnp.array([tokens, tokens - 2, tokens], jnp.int32), tokens)
    return {
        "params": {name: jnp.asarray(w, jnp.float32 if name == "attn_sink" else dtype) for name, w in params.items()},
        "x": jnp.asarray(normal(rng, 3, tokens, cfg.hidden_size), dtype),
        "latent": jnp.asarray(normal(rng, 3, tokens, cfg.q_lora_rank), dtype),
        "window": quantize(jnp.asarray(normal(rng, 3, W, H)), None),
        "entries": quantize(jnp.asarray(normal(rng, 3, entries, H)), None),
        "chosen": jnp.asarray(rng.integers(-1, entries, (3, tokens, selected)), jnp.int32),
        "span": span,
    }


def attend_once(params, x, latent, window, entries, chosen, span, first, cfg):
    first_B = jnp.broadcast_to(first, span.start_B.shape)
    where = {"span": span, "held_B": span.start_B, "first_B": first_B, "frequency": FREQUENCY}
    return attention.attend(params, x, latent, window, entries, chosen, cfg=cfg, **where)


jitted_attend = jax.jit(attend_once, static_argnames="cfg")


def attend(call, first=0, cfg=cfg):
    return jitted_attend(**call, first=jnp.asarray(first, jnp.int32), cfg=cfg)


def attend_oracle(call, first=0):
    """One query at a time; also the ring afterwards, zero bits changed where nothing was written."""
    p = {name: np.asarray(w) for name, w in call["params"].items()}
    x, latent, chosen = (np.asarray(call[name]) for name in ("x", "latent", "chosen"))
    ring, entries = np.array(call["window"].codes, np.float64), np.asarray(call["entries"].codes)
    start, length = np.asarray(call["span"].start_B), np.asarray(call["span"].length_B)
    out = np.zeros(x.shape)
    for b in range(len(x)):
        rows = {int(q): ring[b, q % W].copy() for q in range(max(start[b] - W, 0), start[b])}
        for t in range(length[b]):
            position = int(start[b]) + t
            rows[position] = oracle.rotate(oracle.rms_norm(p["wkv"] @ x[b, t], p["kv_norm"]), position, FREQUENCY)
            ring[b, position % W] = rows[position]
            seen = [rows[q] for q in oracle.window_positions(position, W, first)]
            seen += [entries[b, e] for e in chosen[b, t] if e >= 0]
            query = [oracle.rotate(q, position, FREQUENCY) for q in (p["wq_b"] @ latent[b, t]).reshape(N, H)]
            heads = oracle.sink_attention(np.array(query), seen, p["attn_sink"], H**-0.5)
            heads = np.concatenate([oracle.rotate(head, position, FREQUENCY, inverse=True) for head in heads])
            groups, weights = np.split(heads, cfg.o_groups), np.split(p["wo_a"], cfg.o_groups)
            low = np.concatenate([w @ group for w, group in zip(weights, groups, strict=True)])
            out[b, t] = p["wo_b"] @ low
    return out, ring


@pytest.mark.parametrize("first", [0, 9])
def test_attend_equals_the_oracle(first):
    call = layer(np.random.default_rng(2))
    (y, window), (want, ring) = attend(call, first), attend_oracle(call, first)
    valid = np.asarray(call["span"].valid_BT)
    np.testing.assert_allclose(y[valid], want[valid], rtol=0, atol=ATTEND_ATOL)
    np.testing.assert_allclose(window.codes, ring, rtol=0, atol=ATTEND_ATOL)


def test_a_call_longer_than_the_window():
    call = layer(np.random.default_rng(3), tokens=2 * W + 3)
    (y, window), (want, ring) = attend(call), attend_oracle(call)
    valid = np.asarray(call["span"].valid_BT)
    np.testing.assert_allclose(y[valid], want[valid], rtol=0, atol=ATTEND_ATOL)
    np.testing.assert_allclose(window.codes, ring, rtol=0, atol=ATTEND_ATOL)


def test_window_rows_are_rounded_after_the_rotation():
    call = layer(np.random.default_rng(4))
    plain = attend(call)[1]
    packed = dataclasses.replace(cfg, formats=config.Formats(entry=None, index=None))
    empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), quant.abstract((3, W, H), "fp8_e8m0_32"))
    window = attend(call | {"window": empty}, cfg=packed)[1]
    written = np.asarray(plain.codes) != np.asarray(call["window"].codes)
    want = oracle.quantize(np.asarray(plain.codes).reshape(-1, H), "fp8_e8m0_32")[2].reshape(3, W, H)
    got = jax.jit(quant.dequantize, static_argnums=1)(window, jnp.float32)
    np.testing.assert_array_equal(got[written], want[written])


def test_the_output_of_one_row_carries_no_rotation():
    # Values that are the identity: a lone row comes back as it was before its rotation.
    one = dataclasses.replace(cfg, num_attention_heads=1, o_groups=1, o_lora_rank=H, hidden_size=H)
    rng = np.random.default_rng(5)
    params = {"attn_sink": np.full(1, -1e4, np.float32), "wq_b": normal(rng, H, cfg.q_lora_rank), "kv_norm": np.ones(H)}
    params |= {name: np.eye(H) for name in ("wkv", "wo_a", "wo_b")}
    x = normal(rng, 1, 1, H)
    call = {
        "params": {name: jnp.asarray(w, jnp.float32) for name, w in params.items()}, "x": jnp.asarray(x),
        "latent": jnp.ones((1, 1, cfg.q_lora_rank)), "window": quantize(jnp.zeros((1, W, H)), None),
        "entries": None, "chosen": None,
        "span": Span(jnp.array([4097], jnp.int32), jnp.array([1], jnp.int32), 1),
    }  # fmt: skip
    y, _ = attend(call, first=4097, cfg=one)
    np.testing.assert_allclose(y[0, 0], oracle.rms_norm(x[0, 0], np.ones(H)), rtol=0, atol=ATTEND_ATOL)


def test_later_tokens_change_no_bit():
    call = layer(np.random.default_rng(6))
    x = np.array(call["x"])
    x[:, 4:] += 1
    np.testing.assert_array_equal(attend(call)[0][:, :4], attend(call | {"x": jnp.asarray(x)})[0][:, :4])


@pytest.mark.parametrize("block", [1, 4])
def test_query_blocks_change_nothing(monkeypatch, block):
    call = layer(np.random.default_rng(7))
    whole, window = attend(call)
    monkeypatch.setattr(reference, "fitting", lambda nbytes: block)
    y, again = jax.jit(lambda call: attend_once(**call, first=jnp.asarray(0, jnp.int32), cfg=cfg))(call)
    np.testing.assert_array_equal(again.codes, window.codes)
    np.testing.assert_allclose(y, whole, rtol=0, atol=ATTEND_ATOL)  # products of other shapes sum in another order


def test_bfloat16_and_x64():
    call = layer(np.random.default_rng(8), dtype=jnp.bfloat16)
    assert attend(call)[0].dtype == jnp.bfloat16
    plain = layer(np.random.default_rng(8))
    with jax.enable_x64(True):
        y, _ = attend(plain)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, attend(plain)[0])


def test_query_latent():
    rng = np.random.default_rng(9)
    params = {"wq_a": normal(rng, cfg.q_lora_rank, cfg.hidden_size), "q_norm": normal(rng, cfg.q_lora_rank)}
    x = normal(rng, 1, 2, cfg.hidden_size)
    latent = jax.jit(functools.partial(attention.query_latent, cfg=cfg))(params, x)
    for t in range(2):
        want = oracle.rms_norm(params["wq_a"] @ x[0, t], params["q_norm"])
        np.testing.assert_allclose(latent[0, t], want, rtol=0, atol=ATTEND_ATOL)


def test_rounded_activations_enter_every_projection_but_wo_a():
    call = layer(np.random.default_rng(10))
    stored = {n: quant.abstract(w.shape, "fp8_e8m0_32x32") for n, w in call["params"].items() if n.startswith("w")}
    call = call | {"params": call["params"] | stored, "first": jnp.asarray(0, jnp.int32)}
    rounded = dataclasses.replace(cfg, formats=dataclasses.replace(cfg.formats, activation="fp8_e8m0_32"))
    trace = [equations(lambda call, own=own: attend_once(**call, cfg=own), call) for own in (cfg, rounded)]
    before, after = (sum(e.primitive.name == "custom_jvp_call" for e in each) for each in trace)
    assert (before, after) == (0, 3)  # wq_b, wkv, wo_b


def test_specs_keep_sink_and_norms_in_high_precision():
    formats = {name: spec.format for name, spec in attention.specs(config.v41_flash).items()}
    assert {name for name, format in formats.items() if format} == {"wq_a", "wq_b", "wkv", "wo_a", "wo_b"}
    assert attention.specs(config.v41_flash)["attn_sink"].dtype == "float32"
