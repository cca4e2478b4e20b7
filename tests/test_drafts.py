"""DSpark drafts against the released reference and against the definitions in float64."""

import dataclasses
import functools

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
import sessions

from v41jax import config, drafts, engram, init_cache, init_params, layer_plan, model
from v41jax.cache import Span

TOLERANCE = 2e-4  # of test_golden.py: what two right float32 implementations differ by on the golden inputs
FLOAT_TOLERANCE = 2e-5  # float32 sums in another order through two stages, nothing rounded to a format
CFG = dataclasses.replace(
    sessions.MICRO, num_nextn_predict_layers=2, dspark_target_layer_ids=(1, 3, 4), dspark_noise_token_id=5
)
W = CFG.sliding_window  # 4
TARGETS = len(CFG.dspark_target_layer_ids)


@functools.partial(jax.jit, static_argnames=("cfg", "mode"))
def feed(params, cache, rings, tokens_BT, lengths_B, *, cfg, mode):
    """One call of the backbone, seeded into the draft stages."""
    logits, cache, records = model.run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode=mode)
    hidden, span = drafts.main_hidden(params, records, cfg=cfg)
    return logits, cache, drafts.seed(params, rings, hidden, span, cfg=cfg), hidden


draft = jax.jit(drafts.draft, static_argnames=("cfg", "sample"))
seed = jax.jit(drafts.seed, static_argnames="cfg")


def start(cfg, batch, capacity=64):
    return init_cache(cfg, batch, capacity), drafts.init_draft_cache(cfg, batch)


def feed_all(params, ids, *, cfg, width, mode):
    state = start(cfg, len(ids))
    for first in range(0, ids.shape[1], width):
        part = jnp.asarray(np.pad(ids[:, first : first + width], ((0, 0), (0, max(0, first + width - ids.shape[1])))))
        lengths_B = jnp.full(len(ids), min(width, ids.shape[1] - first), jnp.int32)
        _, *state, hidden = feed(params, *state, part, lengths_B, cfg=cfg, mode=mode)
    return *state, hidden


# ---- golden inputs


@pytest.fixture(scope="module", params=["tiny-f32", "tiny-fp8fp4"])
def golden(request):
    cfg, params = sessions.load(request.param)
    tensors = golden_data.model(request.param)
    return cfg, params, tensors, int(tensors["n_prompt"][0])


def test_hidden_states_of_the_target_layers(golden):
    cfg, params, tensors, n = golden
    *_, hidden = feed_all(params, tensors["input_ids"][:, :n], cfg=cfg, width=n, mode="full")
    assert sessions.spread(hidden, tensors["prefill.main_hidden"]) <= TOLERANCE


@pytest.mark.parametrize(("mode", "width"), [("full", 29), ("exact", 7)])
def test_drafts_are_identical(golden, mode, width):
    cfg, params, tensors, n = golden
    ids = tensors["input_ids"]
    cache, rings, _ = feed_all(params, ids[:, :n], cfg=cfg, width=width, mode=mode)
    one, parts = jnp.ones(len(ids), jnp.int32), []
    for step in range(ids.shape[1] - n):
        token = jnp.asarray(ids[:, n + step : n + step + 1])
        logits, cache, rings, _ = feed(params, cache, rings, token, one, cfg=cfg, mode="full")
        anchor = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        out = draft(params, rings, anchor, cfg=cfg)
        parts.append((np.concatenate([anchor[:, None], out.token_BT], axis=1), out.logits_BTV, out.confidence_BT))
    tokens, logits, confidence = (np.stack(part, axis=1) for part in zip(*parts, strict=True))
    np.testing.assert_array_equal(tokens, tensors["decode.dspark_tokens"])
    assert sessions.spread(logits, tensors["decode.dspark_logits"]) <= TOLERANCE
    assert sessions.spread(confidence, tensors["decode.dspark_confidence"]) <= TOLERANCE


# ---- random inputs, nothing quantised


@functools.cache
def random_params():
    rng = np.random.default_rng(3)

    def shake(path, leaf):  # norms, sinks, bases and biases away from their neutral values
        float_ = jnp.issubdtype(leaf.dtype, jnp.floating)
        return leaf + 0.1 * rng.standard_normal(leaf.shape, dtype=np.float32) if float_ else leaf

    return jax.tree_util.tree_map_with_path(shake, init_params(CFG, jax.random.key(4)))


@pytest.fixture(scope="module")
def params():
    return random_params()


def worst(logits_BV, step):
    del step
    return jnp.argmin(logits_BV, axis=-1).astype(jnp.int32)


def expected(params, hidden_TM, token, *, choose):
    """The block drafted behind one sequence, by the definition: tokens, logits, confidence."""
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
    frequency = oracle.frequencies(CFG.rope_theta, CFG.qk_rope_head_dim)
    seen, n, Z = len(hidden_TM), CFG.dspark_block_size, CFG.hc_mult
    first, last = w["mtp"][0], w["mtp"][-1]
    ids = [token] + [CFG.dspark_noise_token_id] * (n - 1)
    streams = [np.repeat(w["embed"][i][None], Z, axis=0) for i in ids]
    pres = [np.eye(Z)[0] for _ in ids]

    def mix(stage, kind, stream):
        logits = stage[f"hc_{kind}_fn"] @ oracle.rms_norm(stream.reshape(-1), 1)
        scale, base = stage[f"hc_{kind}_scale"], stage[f"hc_{kind}_base"]
        return oracle.split_mixes(logits, scale, base, Z, CFG.hc_sinkhorn_iters, CFG.hc_eps)

    def row(attn, x, position):
        return oracle.rotate(oracle.rms_norm(attn["wkv"] @ x, attn["kv_norm"]), position, frequency)

    for stage in w["mtp"]:
        attn, ffn = stage["attn"], stage["ffn"]
        rows = []
        for position in oracle.window_positions(seen - 1, W):
            main = oracle.rms_norm(first["main_proj"] @ hidden_TM[position].astype(np.float64), first["main_norm"])
            rows.append(row(attn, main, position))
        inputs = [
            oracle.rms_norm(oracle.collapse(p, s), stage["attn_norm"]) for p, s in zip(pres, streams, strict=True)
        ]
        rows += [row(attn, x, seen + i) for i, x in enumerate(inputs)]
        routed = [tuple(ffn["experts"][m][e] for m in ("w1", "w2", "w3")) for e in range(CFG.dspark_n_routed_experts)]
        shared = tuple(ffn["shared_experts"][m] for m in ("w1", "w2", "w3"))
        for i, x in enumerate(inputs):
            query = attn["wq_b"] @ oracle.rms_norm(attn["wq_a"] @ x, attn["q_norm"])
            query = np.stack([oracle.rotate(q, seen + i, frequency) for q in query.reshape(-1, CFG.head_dim)])
            out = oracle.sink_attention(query, rows, attn["attn_sink"], CFG.head_dim**-0.5)
            out = np.stack([oracle.rotate(o, seen + i, frequency, inverse=True) for o in out])
            groups, parts = out.reshape(CFG.o_groups, -1), np.split(attn["wo_a"], CFG.o_groups)
            y = attn["wo_b"] @ np.concatenate([part @ group for part, group in zip(parts, groups, strict=True)])
            pre, post, comb = mix(stage, "attn", streams[i])
            stream = oracle.expand(post, comb, y, streams[i])
            x = oracle.rms_norm(oracle.collapse(pre, stream), stage["ffn_norm"])
            top = CFG.dspark_num_experts_per_tok
            y = oracle.moe(x[None], ffn["gate"]["weight"], ffn["gate"]["bias"], routed, shared, top=top,
                           limit=CFG.swiglu_limit)[0]  # fmt: skip
            pres[i], post, comb = mix(stage, "ffn", stream)
            streams[i] = oracle.expand(post, comb, y, stream)

    tokens, logits, confidence = [], [], []
    for pre, stream in zip(pres, streams, strict=True):
        x, memory = oracle.collapse(pre, stream), last["markov_head"]["embed"][token]
        logits.append(w["head"] @ oracle.rms_norm(x, last["norm"]) + last["markov_head"]["head"] @ memory)
        confidence.append(float(last["confidence_head"]["proj"][0] @ np.concatenate([x, memory])))
        token = int(choose(logits[-1]))
        tokens.append(token)
    return tokens, np.array(logits), np.array(confidence)


def random_hidden(rows, columns, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((rows, columns, TARGETS * CFG.hidden_size), dtype=np.float32)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(("sample", "choose"), [(drafts.greedy, np.argmax), (worst, np.argmin)])
def test_drafts_follow_the_definition(params, sample, choose, x64):
    lengths = np.array([0, 1, W - 1, W, W + 1, 11])
    hidden, tokens = random_hidden(len(lengths), 11), np.array([7, 1, 500, 5, 0, 511])
    with jax.enable_x64(x64):
        rings = drafts.init_draft_cache(CFG, len(lengths))
        for first, width in ((0, 1), (1, 9), (10, 1)):  # ragged chunks, shorter and longer than the ring
            count = jnp.asarray(np.clip(lengths - first, 0, width), jnp.int32)
            span = Span(rings.length_B, count, width)
            rings = seed(params, rings, jnp.asarray(hidden[:, first : first + width]), span, cfg=CFG)
        np.testing.assert_array_equal(rings.length_B, lengths)
        out = draft(params, rings, jnp.asarray(tokens, jnp.int32), cfg=CFG, sample=sample)
        assert [part.dtype for part in out] == [jnp.int32, jnp.float32, jnp.float32]
    for row, length in enumerate(lengths):
        want = expected(params, hidden[row, :length], int(tokens[row]), choose=choose)
        np.testing.assert_array_equal(out.token_BT[row], want[0])
        assert sessions.spread(out.logits_BTV[row], want[1]) <= FLOAT_TOLERANCE
        np.testing.assert_allclose(out.confidence_BT[row], want[2], rtol=0, atol=FLOAT_TOLERANCE)


def test_hidden_states_hold_the_memory_of_an_engram_layer(params):
    ids = jnp.asarray(np.random.default_rng(5).integers(3, CFG.vocab_size, (2, 6)), jnp.int32)
    cache, _ = start(CFG, 2)
    _, _, records = sessions.run(params, cache, ids, jnp.array([6, 4], jnp.int32), cfg=CFG, mode="full")
    hidden, span = drafts.main_hidden(params, records, cfg=CFG)
    flow, target = records[0].flow, CFG.dspark_target_layer_ids[0]
    assert layer_plan(CFG)[target].engram == 0
    streams = engram.engram(params["layers"][target]["engram"], flow.streams_BTZD, flow.engram_rows[0], cfg=CFG)
    D = CFG.hidden_size
    np.testing.assert_array_equal(span.length_B, [6, 4])
    np.testing.assert_allclose(hidden[..., :D], np.mean(streams, axis=2), rtol=0, atol=FLOAT_TOLERANCE)
    assert np.abs(hidden[..., :D] - np.mean(flow.streams_BTZD, axis=2)).max() > 1000 * FLOAT_TOLERANCE


def test_decoder_tails_seed_the_same_rows(params):
    ids = np.random.default_rng(6).integers(3, CFG.vocab_size, (2, 24))
    assert ids.shape[1] > CFG.decoder_tail  # the layers that feed the drafts see different numbers of tokens
    want, got = (feed_all(params, ids, cfg=CFG, width=24, mode=mode)[1] for mode in ("full", "exact"))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=FLOAT_TOLERANCE)


# ---- what was rejected was never seen


@pytest.mark.parametrize("formats", [config.Formats(), config.UNQUANTIZED], ids=["packed", "floats"])
def test_rejected_tokens_leave_no_trace(params, formats):
    cfg = dataclasses.replace(CFG, formats=formats)
    held, width = 2 * W - 1, 4  # the rows cross the end of the ring
    hidden = random_hidden(1, held + width)
    rings = drafts.init_draft_cache(cfg, 1)
    rings = seed(params, rings, jnp.asarray(hidden[:, :held]), Span(rings.length_B, jnp.array([held]), held), cfg=cfg)
    whole = seed(params, rings, jnp.asarray(hidden[:, held:]), Span(rings.length_B, jnp.array([width]), width), cfg=cfg)
    for accepted in range(width + 1):
        fed = hidden[:, held:].copy()
        fed[:, accepted:] = np.nan
        span = Span(rings.length_B, jnp.array([accepted], jnp.int32), width)
        got = seed(params, rings, jnp.asarray(fed), span, cfg=cfg)
        assert int(got.length_B[0]) == held + accepted
        new = [p % W for p in range(held, held + accepted)]
        for after, before, full in zip(got.windows, rings.windows, whole.windows, strict=True):
            for name in ("codes", "scales"):
                want = np.array(getattr(before, name))
                want[:, new] = np.asarray(getattr(full, name))[:, new]
                np.testing.assert_array_equal(getattr(after, name), want)


# ---- dtypes, errors


def test_bfloat16_drafts_have_float32_logits_and_packed_rings():
    cfg = config.tiny

    def whole(params):
        cache, rings = start(cfg, 2)
        tokens, lengths = jnp.zeros((2, 9), jnp.int32), jnp.full((2,), 9, jnp.int32)
        _, _, rings, hidden = feed(params, cache, rings, tokens, lengths, cfg=cfg, mode="exact")
        return rings, hidden, drafts.draft(params, rings, tokens[:, 0], cfg=cfg)

    rings, hidden, out = jax.eval_shape(
        whole, jax.eval_shape(functools.partial(init_params, cfg, dtype=jnp.bfloat16), jax.random.key(0))
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(rings.windows)} == {jnp.dtype(jnp.uint8)}
    assert hidden.dtype == jnp.bfloat16
    assert [part.dtype for part in out] == [jnp.int32, jnp.float32, jnp.float32]
    assert out.logits_BTV.shape == (2, cfg.dspark_block_size, cfg.vocab_size)


def test_bad_input_is_refused(params):
    with pytest.raises(ValueError, match="batch=0; a draft cache holds 1"):
        drafts.init_draft_cache(CFG, 0)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=0: the model has no draft stages"):
        drafts.init_draft_cache(sessions.MICRO, 1)
    with pytest.raises(ValueError, match=r"token_B has shape \(3,\); this draft cache needs \(2,\)"):
        drafts.draft(params, drafts.init_draft_cache(CFG, 2), jnp.zeros(3, jnp.int32), cfg=CFG)
    with pytest.raises(ValueError, match=r"2 layers ran, but drafts read what enters layers \[1, 3, 4\]"):
        jax.eval_shape(
            lambda p: feed(p, *start(CFG, 1), jnp.zeros((1, 2), jnp.int32), jnp.array([2]), cfg=CFG, mode="encoder"),
            params,
        )
