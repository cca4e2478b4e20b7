"""Speculative decoding: forced acceptance everywhere, what rejected drafts leave behind, whose distribution it has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sessions

from v41jax import config, drafts, init_cache, init_params, sampling, speculate
from v41jax.sampling import Sampling

CFG = sessions.DRAFTING  # nothing quantised, so that tokens are the same in programs that round differently
PACKED = dataclasses.replace(CFG, formats=config.Formats())
W, n, RATIO = CFG.sliding_window, CFG.dspark_block_size, max(CFG.compress_ratios)
PERIOD = np.lcm.reduce([W, RATIO, CFG.candidate_block_size])  # of the positions in ring, group and block
B, TOKENS = 4, 2000
GREEDY = Sampling()

pytestmark = pytest.mark.usefixtures("quick_compilation")
feed = jax.jit(speculate.feed, static_argnames=("cfg", "mode"))
verify = jax.jit(speculate.verify, static_argnames="cfg")


@pytest.fixture(scope="module")
def params():
    return init_params(CFG, jax.random.key(4))


def start(cfg, capacity, *, settings=GREEDY, left=TOKENS, batch=B):
    """Empty rows, and a token for each."""
    rows = jax.tree.map(jnp.asarray, sampling.rows([settings] * batch, sampling.row_keys(1, batch)))
    rings, token_B = drafts.init_draft_cache(cfg, batch), 7 + jnp.arange(batch, dtype=jnp.int32)
    left_B = jnp.full(batch, left, jnp.int32)
    return speculate.Decoding(init_cache(cfg, batch, capacity), rings, token_B, left_B, rows)


def forced(token_BT, count_B, cfg=CFG):
    """A block of greedy drafts."""
    logits = jnp.where(jnp.arange(cfg.vocab_size) == token_BT[..., None], jnp.float32(0), -jnp.inf)
    return speculate.Block(token_BT, logits, count_B)


@functools.partial(jax.jit, static_argnames=("cfg", "steps"))
def decode_plainly(params, state, *, cfg, steps):
    def one(state, _):
        made, state = speculate.step(params, state, jnp.float32(0), cfg=cfg)
        return state, made.token_BT[:, 0]

    return jax.lax.scan(one, dataclasses.replace(state, rings=None), length=steps)[1].T


@functools.partial(jax.jit, static_argnames=("cfg", "steps"))
def decode_forced(params, state, said_BS, *, cfg, steps):
    """Drafts the tokens that will be said up to a place that varies by row and step, then others."""

    def one(carry, number):
        state, key = carry
        right_B = jax.random.randint(jax.random.fold_in(key, number), (B,), 0, n + 1, jnp.int32)
        place = jnp.arange(n, dtype=jnp.int32)
        at_BT = jnp.minimum(state.cache.length_B[:, None] + place, TOKENS - 1)
        token_BT = jnp.take_along_axis(said_BS, at_BT, axis=1)
        token_BT = jnp.where(place < right_B[:, None], token_BT, (token_BT + 1) % cfg.vocab_size)
        position_B = state.cache.length_B
        made, state = speculate.verify(params, state, forced(token_BT, jnp.full(B, n)), cfg=cfg)
        return (state, key), (made, position_B, right_B)

    (state, _), out = jax.lax.scan(one, (state, jax.random.key(2)), jnp.arange(steps))
    return state, out


def test_drafts_change_no_token_wherever_they_are_accepted_or_rejected(params):
    state = start(CFG, TOKENS + 1)
    said_BS = decode_plainly(params, state, cfg=CFG, steps=TOKENS)
    assert len(np.unique(said_BS)) > 20  # else a wrong token would hardly show
    state, (made, position, right) = decode_forced(params, state, said_BS, cfg=CFG, steps=TOKENS // 2)
    np.testing.assert_array_equal(state.left_B, np.zeros(B))
    for b in range(B):
        tokens = np.asarray(made.token_BT[:, b]).ravel()
        np.testing.assert_array_equal(tokens[tokens >= 0], said_BS[b])
    made_B = np.sum(np.asarray(made.token_BT) >= 0, axis=2)
    whole = np.asarray(position) + 1 + n < TOKENS
    np.testing.assert_array_equal(made_B[whole], 1 + np.asarray(right)[whole])
    seen = {(int(p) % PERIOD, int(r)) for p, r in zip(position[whole], right[whole], strict=True)}
    assert len(seen) == PERIOD * (n + 1)


def arrays(state):
    return state.cache, state.rings, state.token_B, state.left_B


def bits(tree):
    """Arrays of a tree by name."""
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same_bits(got, want):
    got, want = bits(got), bits(want)
    assert got.keys() == want.keys()
    for name in got:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def test_rejected_drafts_leave_no_bit_behind(params):
    state, mode = start(PACKED, 64), {"cfg": PACKED, "mode": "full"}
    lengths = jnp.array([8, 9, 10, 11], jnp.int32)  # every place of ring, group and block
    prompt = jnp.asarray(np.random.default_rng(0).integers(3, CFG.vocab_size, (B, n + 1)), jnp.int32)
    cache, rings = state.cache, state.rings
    for first in (0, 4, 8):
        part = jnp.clip(lengths - first, 0, n + 1)
        _, cache, rings = feed(params, cache, rings, prompt, part, **mode)
    state = dataclasses.replace(state, cache=cache, rings=rings)

    # What the model says next, found one token at a time.
    said, now = [], state
    for _ in range(n + 1):
        made, now = verify(params, now, forced(jnp.zeros((B, n), jnp.int32), jnp.zeros(B, jnp.int32)), cfg=PACKED)
        said.append(made.token_BT[:, 0])
    said_BT = jnp.stack(said[:n], axis=1)
    for accepted in range(n + 1):
        token_BT = jnp.where(jnp.arange(n) < accepted, said_BT, (said_BT + 1) % CFG.vocab_size)
        made, got = verify(params, state, forced(token_BT, jnp.full(B, n)), cfg=PACKED)
        np.testing.assert_array_equal(jnp.sum(made.token_BT >= 0, axis=1), np.full(B, accepted + 1))
        _, want = verify(params, state, forced(said_BT, jnp.full(B, accepted)), cfg=PACKED)
        assert_same_bits(arrays(got), arrays(want))
        # And by a call that is only ever given what is kept.
        tokens_BT = jnp.concatenate([state.token_B[:, None], said_BT], axis=1)
        kept = jnp.full(B, accepted + 1, jnp.int32)
        _, cache, rings = feed(params, state.cache, state.rings, tokens_BT, kept, **mode)
        assert_same_bits((got.cache, got.rings), (cache, rings))


def test_a_row_without_tokens_left_rests(params):
    state = start(PACKED, 64)
    state = dataclasses.replace(state, left_B=jnp.array([0, 1, 2, 9], jnp.int32))
    made, after = verify(params, state, forced(jnp.full((B, n), 3, jnp.int32), jnp.full(B, n)), cfg=PACKED)
    assert np.sum(np.asarray(made.token_BT) >= 0, axis=1).tolist()[:2] == [0, 1]
    np.testing.assert_array_equal(made.logprob_BT[0], np.zeros(n + 1))

    def row(state, b):
        return jax.tree.map(lambda leaf: leaf[b], arrays(state))

    assert_same_bits(row(after, 0), row(state, 0))
    assert int(after.cache.length_B[1]) == 1 and int(after.left_B[1]) == 0


# ---- whole steps

ROWS = 128


@pytest.fixture(scope="module")
def many_rows():
    """One state of many rows, and the program of a step, donated the state."""
    state = start(CFG, 2048, settings=Sampling(temperature=1.0), batch=ROWS)
    return dataclasses.replace(state, token_B=jnp.full(ROWS, 11, jnp.int32))


@pytest.fixture(scope="module")
def step(params, many_rows):
    lowered = jax.jit(speculate.step, static_argnames="cfg", donate_argnames="state").lower(
        params, many_rows, np.float32(0), cfg=CFG
    )
    return lowered.compile()


def test_steps_copy_no_pool(many_rows, step):
    pools = sum(leaf.nbytes for leaf in jax.tree.leaves(many_rows.cache.pools))
    assert step.memory_analysis().alias_size_in_bytes >= pools
    assert step.memory_analysis().temp_size_in_bytes < pools / 2


def test_a_step_with_drafts_has_the_models_distribution(params, many_rows, step):
    bins, chi_square_99_9 = 8, 24.3  # 7 degrees of freedom
    logits, _, _ = sessions.run(params, init_cache(CFG, 1, 8), jnp.array([[11]]), jnp.array([1]), cfg=CFG, mode="full")
    probability = np.asarray(jax.nn.softmax(logits[0]), np.float64)
    first, more = [], []
    for seed in range(10):
        rows = many_rows.rows._replace(key_B=sampling.row_keys(seed, ROWS))
        state = jax.tree.map(jnp.copy, dataclasses.replace(many_rows, rows=rows))
        made, _ = step(params, state, np.float32(0))
        first.append(np.asarray(made.token_BT[:, 0]))
        more.append(np.asarray(made.token_BT[:, 1] >= 0))
        np.testing.assert_allclose(made.logprob_BT[:, 0], np.log(probability)[first[-1]], rtol=0, atol=1e-4)
    assert 0.05 < np.mean(more) < 0.95  # both ways to a first token are taken
    counts = np.bincount(np.concatenate(first) % bins, minlength=bins)
    want = counts.sum() * np.bincount(np.arange(CFG.vocab_size) % bins, probability)
    assert np.sum((counts - want) ** 2 / want) < chi_square_99_9


def test_what_is_not_worth_verifying_is_not_verified(params, many_rows, step):
    made_1, made_0 = (
        step(params, jax.tree.map(jnp.copy, many_rows), np.float32(least))[0].token_BT for least in (1, 0)
    )
    np.testing.assert_array_equal(jnp.sum(made_1 >= 0, axis=1), np.ones(ROWS))
    assert int(jnp.max(jnp.sum(made_0 >= 0, axis=1))) > 1


def test_drafts_are_worth_verifying_while_their_chances_last():
    confidence = jnp.log(jnp.array([[1.0, 9.0, 9.0], [9.0, 9.0, 1 / 9], [9.0, 9.0, 9.0]]))  # 0.5, 0.9, 0.1
    for least, want in (
        (0.0, [3, 3, 3]),
        (0.4, [3, 2, 3]),
        (0.42, [2, 2, 3]),
        (0.6, [0, 2, 3]),
        (0.75, [0, 2, 2]),
        (1.0, [0, 0, 0]),
    ):
        np.testing.assert_array_equal(speculate.worth_verifying(confidence, jnp.float32(least)), want)


def test_bad_settings_are_refused():
    with pytest.raises(ValueError, match=r"least_chance=1\.5; it is a probability"):
        speculate.check(CFG, drafts=False, least_chance=1.5)
    with pytest.raises(ValueError, match="the model has no draft stages; decode it without drafts"):
        speculate.check(sessions.MICRO, drafts=True, least_chance=0)
    with pytest.raises(ValueError, match=r"dspark_block_size=4 .* whole window of sliding_window=4 rows"):
        speculate.check(dataclasses.replace(CFG, dspark_block_size=4), drafts=True, least_chance=0)
