"""What must not change the result: chunks, company in the batch, padding, capacity, decoder tails, the future."""

import dataclasses

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sessions

from v41jax import config, decode, forward, init_cache, init_params, layer_plan, model, prefill, prefill_encoder
from v41jax.cache import Span

GOLDEN_TOLERANCE = 2e-4  # of test_golden.py
FLOAT_TOLERANCE = 1e-5  # float32 sums in another order, nothing rounded to a format
CFG = sessions.MICRO
TAIL = CFG.decoder_tail  # 10 tokens; a pool holds 12 entries
LONGEST = 43  # every program takes seconds to compile, so calls share few widths and pad to them


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, jax.random.key(1))


def random_prompts(*lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, CFG.vocab_size, n) for n in lengths]


def assert_same_state(got, want, tolerance=None):
    for name, value in want.items():
        if tolerance is None or not np.issubdtype(value.dtype, np.floating):
            np.testing.assert_array_equal(got[name], value, err_msg=name)
        else:
            bound = tolerance * np.abs(value).max(initial=1e-30)
            np.testing.assert_allclose(got[name], value, rtol=0, atol=bound, err_msg=name)


# ---- random inputs, nothing quantised


def full(params, prompt):
    """One prompt alone through every layer, in one call."""
    return sessions.feed(params, [prompt], cfg=CFG, width=LONGEST, mode="full")


def at_once(params, prompt):
    """The logits of every position of a prompt, without a cache."""
    padding = [0, LONGEST - len(prompt)]
    return np.asarray(forward(params, np.pad(prompt, padding)[None], cfg=CFG))[0, : len(prompt)]


@pytest.fixture(scope="module")
def whole(params):
    """Three prompts, longer and shorter than the decoder tail, each alone through every layer."""
    prompts = random_prompts(30, TAIL, 1)
    return prompts, [full(params, p) for p in prompts]


@pytest.mark.parametrize(
    "width,columns,capacity",
    [(1, 1, 128), (2, 7, 128), (3, 7, 128), (7, 7, 128), (16, 30, 128), (30, 30, 128), (20, 30, 4096)],
)
def test_chunks_company_padding_and_capacity_change_nothing(params, whole, width, columns, capacity):
    prompts, alone = whole  # a ragged batch, decoder tails only
    logits, cache = sessions.feed(params, prompts, cfg=CFG, width=width, padded=columns, capacity=capacity)
    for row, (want, solo) in enumerate(alone):
        assert sessions.spread(logits[row], want[0]) <= FLOAT_TOLERANCE
        assert_same_state(sessions.state(cache, row), sessions.state(solo), FLOAT_TOLERANCE)


def test_prefill_equals_forward_at_every_length(params):
    (prompt,) = random_prompts(24)
    want = at_once(params, prompt)
    for first in range(0, len(prompt), 3):  # batches of three, as above
        rows = [prompt[: n + 1] for n in range(first, first + 3)]
        logits, _ = sessions.feed(params, rows, cfg=CFG, width=30)
        assert sessions.spread(logits, want[first : first + 3]) <= FLOAT_TOLERANCE


def test_the_future_cannot_matter(params):
    (prompt,) = random_prompts(LONGEST)
    changed = prompt.copy()
    changed[17:] = changed[17:][::-1]
    before, after = (at_once(params, p) for p in (prompt, changed))
    np.testing.assert_array_equal(before[:17], after[:17])
    assert (before[17:] != after[17:]).any(-1).all()


def test_greedy_decode_equals_prefill_of_the_same_tokens(params):
    prompt = list(random_prompts(11)[0])
    logits, cache = sessions.feed(params, [prompt], cfg=CFG, width=5)
    while len(prompt) < LONGEST:
        prompt.append(int(np.argmax(logits[0])))
        logits, cache = decode(params, cache, np.array(prompt[-1:]), cfg=CFG)
        again = at_once(params, prompt)[-1]
        assert sessions.spread(logits[0], again) <= FLOAT_TOLERANCE
        assert np.argmax(logits[0]) == np.argmax(again)


def test_early_chunks_need_no_decoder(params):
    (prompt,) = random_prompts(TAIL + 30)
    want, solo = full(params, prompt)
    cache = init_cache(CFG, 1, 128)
    for first in range(0, 30, 15):
        cache = prefill_encoder(params, cache, prompt[None, first : first + 15], cfg=CFG)
        assert int(cache.owed_B[0]) == TAIL
    with pytest.raises(ValueError, match=f"decode: {TAIL} more prompt tokens"):
        decode(params, cache, prompt[:1], cfg=CFG)
    short, cache = prefill(params, cache, prompt[None, 30:35], cfg=CFG)
    assert np.isnan(short).all()  # windows still lack tokens
    logits, cache = prefill(params, cache, prompt[None, 35:], cfg=CFG)
    assert sessions.spread(logits, want) <= FLOAT_TOLERANCE
    assert_same_state(sessions.state(cache), sessions.state(solo), FLOAT_TOLERANCE)


def test_the_tail_is_tight(params, monkeypatch):
    (prompt,) = random_prompts(TAIL + 14)
    want, _ = full(params, prompt)
    monkeypatch.setattr(Span, "last", lambda span, width, last=Span.last: last(span, width - 1))
    cache, lengths_B = init_cache(CFG, 1, 128), jnp.array([len(prompt)], jnp.int32)
    step = jax.jit(lambda *args: model.run(*args, cfg=CFG, mode="exact")[0])
    short = step(params, cache, jnp.asarray(prompt[None], jnp.int32), lengths_B)
    assert sessions.spread(short, want) > FLOAT_TOLERANCE  # one token fewer a layer is not exact


def test_replay_cuts_windows_at_the_segment(params):
    W = CFG.sliding_window
    short, long = random_prompts(W, 20)
    replay, _ = sessions.feed(params, [short], cfg=CFG, width=W, padded=10, mode="replay")
    exact, _ = full(params, short)
    assert sessions.spread(replay, exact) <= FLOAT_TOLERANCE  # the segment is the prompt: nothing is cut
    exact, _ = full(params, long)
    replay, cache = sessions.feed(params, [long], cfg=CFG, width=20, mode="replay")
    assert sessions.spread(replay, exact) > FLOAT_TOLERANCE  # an approximation
    pieces, other = sessions.feed(params, [long], cfg=CFG, width=10, mode="replay")
    assert sessions.spread(pieces, replay) <= FLOAT_TOLERANCE  # but not one that depends on the chunks
    assert_same_state(sessions.state(other), sessions.state(cache), FLOAT_TOLERANCE)


# ---- golden inputs, quantised as released


@pytest.fixture(scope="module", params=["tiny-f32", "tiny-fp8fp4"])
def golden(request):
    cfg, params = sessions.load(request.param)
    tensors = golden_data.model(request.param)
    ids = tensors["input_ids"]
    assert ids.shape[1] > cfg.decoder_tail > tensors["n_prompt"][0]  # longer and shorter than the tail
    return cfg, params, ids, tensors


@pytest.mark.parametrize("length", [29, 41])
def test_exact_equals_full_on_golden_inputs(golden, length):
    cfg, params, ids, tensors = golden
    want = {29: tensors["prefill.logits"][:, -1], 41: tensors["decode.logits"][:, -1]}[length]
    caches = []
    for mode in ("exact", "full"):
        logits, cache = sessions.feed(params, ids[:, :length], cfg=cfg, width=length, padded=41, mode=mode)
        assert sessions.spread(logits, want) <= GOLDEN_TOLERANCE
        caches.append(cache)
    for row in range(len(ids)):
        exact, full = (sessions.state(cache, row) for cache in caches)
        partial = [name for name in full if "partial" in name]  # float32, never quantised
        assert_same_state(exact, {name: value for name, value in full.items() if name not in partial})
        assert_same_state(exact, {name: full[name] for name in partial}, FLOAT_TOLERANCE)


@pytest.mark.parametrize(
    "width,columns,capacity", [(1, 1, 128), (2, 7, 4096), (3, 7, 4096), (7, 7, 4096), (16, 16, 128)]
)
def test_ragged_chunks_on_golden_inputs(width, columns, capacity):
    cfg, params = sessions.load("tiny-fp8fp4")
    tensors = golden_data.model("tiny-fp8fp4")
    logits = np.concatenate([tensors["prefill.logits"], tensors["decode.logits"]], axis=1)
    rows = [(0, 41), (1, 29), (0, 1), (1, 2), (0, 17)]
    prompts = [tensors["input_ids"][row, :length] for row, length in rows]
    got, _ = sessions.feed(params, prompts, cfg=cfg, width=width, padded=columns, capacity=capacity)
    for number, (row, length) in enumerate(rows):
        assert sessions.spread(got[number], logits[row, length - 1]) <= GOLDEN_TOLERANCE


# ---- random inputs, quantised: layer by layer from equal inputs, for a flipped rounding moves everything after it


def test_each_layer_from_equal_inputs_in_chunks():
    cfg = dataclasses.replace(CFG, quantized=True, formats=config.Formats())
    params = init_params(cfg, jax.random.key(2))
    prompt, start = jnp.asarray(random_prompts(30)[0][None], jnp.int32), jnp.zeros(1, jnp.int32)
    length = start + 30
    cache = init_cache(cfg, 1, 64)
    _, after, records = sessions.run(params, cache, prompt, length, cfg=cfg, mode="full")
    flow, _ = model.embed(params, cache.ngram_BN, prompt, span=Span(start, length, 30), cfg=cfg)
    layer_step = jax.jit(model.run_layer, static_argnames=("keeps", "layer", "cfg"))
    for layer, weights in zip(layer_plan(cfg), params["layers"], strict=True):
        window, pool = cache.windows[layer.layer], None
        if layer.pool is not None:
            pool = (cache if layer.role is config.Role.FULL else after).pools[layer.pool]
        parts = []
        for first, width in ((0, 1), (1, 14), (15, 1), (16, 14)):
            part = jax.tree.map(lambda a, stop=first + width, first=first: a[:, first:stop], flow)
            span = Span(start + first, start + width, width)
            where = {"span": span, "held_B": span.start_B, "first_B": start, "keeps": width}
            record, window, pool = layer_step(weights, part, window, pool, **where, layer=layer, cfg=cfg)
            parts.append(record.flow)
        flow = records[layer.layer].flow
        got = jax.tree.map(lambda *a: np.concatenate(a, axis=1), *parts)
        np.testing.assert_allclose(got.streams_BTZD, flow.streams_BTZD, rtol=0, atol=FLOAT_TOLERANCE)
        np.testing.assert_allclose(got.pre_BTZ, flow.pre_BTZ, rtol=0, atol=FLOAT_TOLERANCE)
        for name, value in jax.tree.leaves_with_path((flow.selection, after.windows[layer.layer])):
            same = dict(jax.tree.leaves_with_path((got.selection, window)))[name]
            np.testing.assert_array_equal(same, value, err_msg=f"layer {layer.layer}{name}")
        if layer.role is config.Role.FULL:
            for name in ("entries", "keys"):  # to the byte
                jax.tree.map(np.testing.assert_array_equal, getattr(pool, name), getattr(after.pools[layer.pool], name))
