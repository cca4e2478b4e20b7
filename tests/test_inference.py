"""The doors: what they refuse, what they donate, and the dtypes they keep."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sessions
from sessions import MICRO

from v41jax import (
    bytes_per_token,
    config,
    decode,
    forward,
    inference,
    init_cache,
    init_params,
    model,
    parameter_count,
    prefill,
    prefill_encoder,
    specs,
    tree,
    window_bytes,
)

V = MICRO.vocab_size


@functools.cache
def params():
    return init_params(MICRO, jax.random.key(1))


def cache(batch=2, capacity=8):
    return init_cache(MICRO, batch, capacity)


TOKENS = np.full((2, 4), 5)
REFUSED = [  # tokens, keywords, message
    (TOKENS, {"mode": "half"}, "mode='half'; legal are exact, full, replay"),
    (TOKENS[0], {}, r"tokens_BT has shape \(4,\); it must be \(batch, tokens\)"),
    (TOKENS[:, :0], {}, r"shape \(2, 0\)"),
    (TOKENS * 1.0, {}, "tokens_BT has dtype float64; it must hold integers"),
    (TOKENS + V, {}, f"token id {V + 5} is not in the vocabulary; legal are 0 to {V - 1}"),
    (-TOKENS, {}, "token id -5 is not in the vocabulary"),
    (TOKENS, {"lengths_B": [4]}, r"lengths_B has shape \(1,\); 2 rows of tokens need \(2,\)"),
    (TOKENS, {"lengths_B": [4, 5]}, r"lengths_B=\[4, 5\]; with 4 columns of tokens legal are 0 to 4"),
    (TOKENS, {"lengths_B": [-1, 4]}, r"lengths_B=\[-1, 4\]"),
    (TOKENS[:1], {}, "tokens have 1 rows, but the cache was made for batch=2"),
    (np.full((2, 9), 5), {}, "row 0 holds 0 tokens; 9 more pass the capacity of 8.*init_cache.cfg, batch, 9. or more"),
    (np.full((2, 9), 5), {"lengths_B": [1, 9]}, "row 1 holds 0 tokens; 9 more pass the capacity of 8"),
]


@pytest.mark.parametrize(("tokens", "keywords", "message"), REFUSED)
def test_prefill_refuses_before_any_work(tokens, keywords, message):
    there = cache()
    with pytest.raises(ValueError, match=message):
        prefill({}, there, tokens, cfg=MICRO, **keywords)
    assert not there.length_B.is_deleted()  # nothing is lost


def test_decode_refuses_before_overflow_and_keeps_the_cache():
    _, full = prefill(params(), cache(), np.full((2, 8), 5), cfg=MICRO, lengths_B=[3, 8])
    with pytest.raises(ValueError, match="row 1 holds 8 tokens; 1 more pass the capacity of 8"):
        decode(params(), full, np.array([5, 5]), cfg=MICRO)
    assert not full.length_B.is_deleted()
    with pytest.raises(ValueError, match=r"token_B has shape \(2, 1\); decode takes one token a row"):
        decode(params(), full, np.array([[5], [5]]), cfg=MICRO)


def test_a_donated_cache_is_named():
    first = cache()
    prefill_encoder(params(), first, TOKENS, cfg=MICRO)
    with pytest.raises(ValueError, match="was given to an earlier call, which donated it"):
        prefill(params(), first, TOKENS, cfg=MICRO)


def test_overflow_under_an_outer_jit_is_nan_and_writes_no_other_row():
    _, full = prefill(params(), cache(), np.full((2, 8), 5), cfg=MICRO, lengths_B=[3, 8])
    before = sessions.state(full, row=1)
    step = jax.jit(lambda p, c, t: decode(p, c, t, cfg=MICRO))
    logits, after = step(params(), full, jnp.array([5, 5], jnp.int32))
    assert np.isfinite(logits[0]).all()
    assert np.isnan(logits[1]).all()
    for name in ("pool 0 entries", "pool 1 entries", "pool 1 keys"):
        np.testing.assert_array_equal(sessions.state(after, row=1)[name], before[name])


def test_a_row_without_tokens_keeps_its_state_and_has_no_logits():
    _, held = prefill(params(), cache(), np.full((2, 4), 5), cfg=MICRO, lengths_B=[3, 4])
    before = sessions.state(held, row=0)
    logits, held = prefill(params(), held, np.full((2, 4), 6), cfg=MICRO, lengths_B=[0, 4])
    assert np.isnan(logits[0]).all()
    assert np.isfinite(logits[1]).all()
    for name, value in sessions.state(held, row=0).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_decode_updates_the_cache_in_place_without_growth():
    _, held = prefill(params(), cache(capacity=64), TOKENS, cfg=MICRO)
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(held) if leaf.size]
    for step in range(10):
        _, held = decode(params(), held, np.array([step, 7]), cfg=MICRO)
    assert [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(held) if leaf.size] == pointers


def test_decode_is_traced_once():
    _, held = prefill(params(), cache(capacity=64), TOKENS, cfg=MICRO)
    _, held = decode(params(), held, np.array([5, 7]), cfg=MICRO)
    programs = inference.run_jitted._cache_size()
    for step in range(5):
        _, held = decode(params(), held, jnp.array([step, 7]), cfg=MICRO)
    assert inference.run_jitted._cache_size() == programs


def test_bfloat16_flows_in_bfloat16():
    half = init_params(MICRO, jax.random.key(1), dtype=jnp.bfloat16)
    lengths = jnp.full(2, 4, jnp.int32)
    run = functools.partial(model.run, cfg=MICRO, mode="full", read="all")
    logits, _, records = jax.eval_shape(run, half, cache(), jnp.asarray(TOKENS), lengths)
    assert logits.dtype == jnp.float32
    for record in records:
        assert record.flow.streams_BTZD.dtype == jnp.bfloat16
        assert record.flow.pre_BTZ.dtype == record.routes.weight.dtype == jnp.float32
    got, want = (np.asarray(forward(p, TOKENS[:1], cfg=MICRO)) for p in (half, params()))
    assert sessions.spread(got[:, 0], want[:, 0]) < 0.2  # 8 bits of mantissa through 5 layers; 1 would be unrelated


def test_x64_changes_nothing():
    prompt = np.arange(3, 23)[None]
    want = np.asarray(forward(params(), prompt, cfg=MICRO))
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        got = np.asarray(forward(params(), prompt, cfg=MICRO))
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, want)


def test_bytes_of_the_release():
    cfg = config.v41_flash
    assert bytes_per_token(cfg) == 890
    assert window_bytes(cfg) == 2_703_360
    rows = jax.eval_shape(lambda: init_cache(cfg, 1, 1024))
    assert {leaf.dtype for leaf in jax.tree.leaves((rows.windows, [(p.entries, p.keys) for p in rows.pools]))} == {
        np.dtype("uint8")
    }
    for pool, ratio in zip(rows.pools, (2, 2, 2, 1), strict=True):
        assert pool.entries.nbytes == 1024 // ratio * 288
        assert pool.keys.nbytes == 1024 // ratio * 68
    assert {window.nbytes for window in rows.windows} == {128 * 528}


def test_parameters_of_the_release():
    counts = parameter_count(config.v41_flash)
    assert counts == {"backbone": 551_880_835_184, "engram": 196_613_849_600, "drafts": 14_225_362_530}
    abstract = tree.abstract(specs(config.v41_flash), jnp.bfloat16)
    packed = tree.nbytes(abstract)
    logical = sum(counts.values())
    assert 0.55 * logical < packed < 0.75 * logical  # most weights are 4 bits, the tables 8
    assert math.prod(abstract["layers"][0]["ffn"]["experts"]["w1"].codes.shape) == 384 * 2304 * 5120 // 2


def test_init_cache_refuses_what_cannot_hold_a_group():
    with pytest.raises(ValueError, match=r"capacity=1 tokens; legal are 2 .one group of every layer. to 16777216"):
        init_cache(MICRO, 1, 1)
    with pytest.raises(ValueError, match="batch=0; a cache holds 1 sequence or more"):
        init_cache(MICRO, 0, 8)
