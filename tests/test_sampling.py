"""Drawing tokens and accepting drafts, against the distributions they should have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from v41jax import sampling
from v41jax.sampling import Sampling

NUMBER = 4000
CHI_SQUARE_99_9 = {3: 16.3, 4: 18.5, 24: 51.2}  # by degrees of freedom
sample = jax.jit(sampling.sample)


def chi_square(counts, probability) -> float:
    """The statistic; a count where the probability is 0 makes it infinite."""
    counts, want = np.asarray(counts, float).ravel(), np.asarray(probability, float).ravel() * np.sum(counts)
    assert counts[want == 0].sum() == 0
    return float((np.square(counts - want)[want > 0] / want[want > 0]).sum())


def draws(settings, logits):
    rows = sampling.rows([settings] * NUMBER, sampling.row_keys(3, NUMBER))
    many = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (NUMBER, len(logits)))
    return np.bincount(sample(many, rows, np.arange(NUMBER, dtype=np.int32)), minlength=len(logits))


def test_sampling_follows_the_distribution():
    probability = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probability)
    assert chi_square(draws(Sampling(temperature=1.0), logits), probability) < CHI_SQUARE_99_9[3]
    hot = np.sqrt(probability) / np.sqrt(probability).sum()
    assert chi_square(draws(Sampling(temperature=2.0), logits), hot) < CHI_SQUARE_99_9[3]
    cut = np.array([4, 3, 0, 0]) / 7
    assert chi_square(draws(Sampling(temperature=1.0, top_k=2), logits), cut) < CHI_SQUARE_99_9[3]


def test_top_k_and_top_p_keep_the_fewest_best():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_k=2), logits))[0]) == {1, 3}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_p=0.7), logits))[0]) == {1, 3}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_p=0.71), logits))[0]) == {1, 2, 3}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_p=1e-9), logits))[0]) == {1}
    assert set(np.nonzero(draws(Sampling(temperature=1.0, top_k=2), [1.0] * 4))[0]) == {0, 1}


def test_a_row_draws_by_its_own_settings_key_and_position():
    rng = np.random.default_rng(0)
    settings = [Sampling(), Sampling(temperature=0.7, top_k=3), Sampling(temperature=1.5, top_p=0.8), Sampling()]
    rows = jax.tree.map(jnp.asarray, sampling.rows(settings, sampling.row_keys(9, 4)))
    logits, position = jnp.asarray(rng.standard_normal((4, 50)), jnp.float32), np.array([7, 0, 3, 3], np.int32)
    together = sample(logits, rows, position)
    np.testing.assert_array_equal(together[jnp.array([0, 3])], jnp.argmax(logits, axis=1)[jnp.array([0, 3])])
    for b in range(4):  # the others of its batch are rows like itself
        fours = jax.tree.map(lambda a, b=b: a[jnp.full(4, b)], (logits, rows, jnp.asarray(position)))
        alone = sample(*fours)
        np.testing.assert_array_equal(alone, np.full(4, together[b]))
    drawn = [int(sample(logits, rows, position + np.int32(step))[2]) for step in range(20)]
    assert len(set(drawn)) > 1


def test_greedy_takes_the_lowest_of_equals():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    rows = sampling.rows([Sampling()] * 2, sampling.row_keys(0, 2))
    np.testing.assert_array_equal(sample(logits, rows, np.zeros(2, np.int32)), [1, 0])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0; it must be 0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"top_k": -2}, "top_k=-2; it must be 0"),
        ({"top_p": 0.0}, "top_p=0.0; it must be over 0"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**settings)


# ---- accepting drafts

N, V = 20_000, 5


@jax.jit
def draft_and_accept(target_VV, draft_VV, key_B, count_B):
    """Two drafts behind token 0 and what is accepted of them, where each token follows the last one by a table."""
    place = jnp.arange(3, dtype=jnp.int32)
    rows = sampling.Rows(jnp.ones(N), jnp.zeros(N, jnp.int32), jnp.ones(N), key_B, jnp.zeros(N, jnp.int32))
    first_B, proposed_1 = sampling.sample_draft(jnp.tile(draft_VV[0], (N, 1)), rows, jnp.zeros(N, jnp.int32))
    second_B, proposed_2 = sampling.sample_draft(draft_VV[first_B], rows, jnp.ones(N, jnp.int32))
    token_BT = jnp.stack([first_B, second_B], axis=1)
    seen_BT = jnp.pad(token_BT, ((0, 0), (1, 0)))  # the token each of three targets follows
    target = sampling.restrict(target_VV[seen_BT], rows)
    proposed = jnp.stack([proposed_1, proposed_2], axis=1)
    keys = sampling.position_keys(key_B, jnp.tile(place, (N, 1)))
    accepted_B, last_B = sampling.accept(target, proposed, token_BT, count_B, keys)
    return jnp.where(place < accepted_B[:, None], jnp.pad(token_BT, ((0, 0), (0, 1))), last_B[:, None]), accepted_B


@pytest.fixture(scope="module")
def tables():
    rng = np.random.default_rng(1)
    target, draft = (rng.dirichlet(np.ones(V), V) for _ in range(2))
    target[:, 4], target[2, 0] = 0, 0  # tokens that only drafts hold
    return target / target.sum(1, keepdims=True), draft


@pytest.mark.parametrize("count", [0, 1, 2, None])
def test_accepted_tokens_have_the_targets_distribution(tables, count):
    target, draft = tables
    count_B = np.arange(N, dtype=np.int32) % 3 if count is None else np.full(N, count, np.int32)
    with np.errstate(divide="ignore"):
        logits = jnp.asarray(np.log(target), jnp.float32), jnp.asarray(np.log(draft), jnp.float32)
    made_BT, accepted_B = (np.asarray(a) for a in draft_and_accept(*logits, sampling.row_keys(5, N), count_B))
    assert np.all(accepted_B <= count_B)
    assert chi_square(np.bincount(made_BT[:, 0], minlength=V), target[0]) < CHI_SQUARE_99_9[4]
    overlap = np.minimum(target[0], draft[0]).sum()  # what share of first drafts rejection sampling accepts
    if count in (1, 2):
        assert abs(np.mean(accepted_B > 0) - overlap) < 5 * np.sqrt(overlap * (1 - overlap) / N)
    for first in np.nonzero(target[0])[0]:  # what was made second, given the first: no token of it depends on luck
        second = made_BT[(made_BT[:, 0] == first) & (accepted_B >= 1), 1]
        assert len(second) == 0 or chi_square(np.bincount(second, minlength=V), target[first]) < CHI_SQUARE_99_9[4]


def test_equal_distributions_accept_every_draft(tables):
    logits = jnp.asarray(np.log(tables[1]), jnp.float32)
    made_BT, accepted_B = draft_and_accept(logits, logits, sampling.row_keys(6, N), np.full(N, 2, np.int32))
    assert int(jnp.min(accepted_B)) == 2
    assert int(jnp.max(made_BT)) < V


def test_greedy_accepts_the_agreeing_prefix():
    rng = np.random.default_rng(2)
    B, n = 64, 3
    target = jnp.asarray(rng.standard_normal((B, n + 1, V)), jnp.float32)
    best = np.argmax(target, axis=-1)
    token = np.where(rng.random((B, n)) < 0.7, best[:, :n], (best[:, :n] + 1) % V)
    one = np.where(np.arange(V) == token[..., None], np.float32(0), -np.inf).astype(np.float32)
    rows = sampling.rows([Sampling()] * B, sampling.row_keys(0, B))
    count = rng.integers(0, n + 1, B).astype(np.int32)
    keys = sampling.position_keys(rows.key_B, jnp.tile(jnp.arange(n + 1, dtype=jnp.int32), (B, 1)))
    target = sampling.restrict(target, jax.tree.map(jnp.asarray, rows))
    accepted, last = jax.jit(sampling.accept)(target, jnp.asarray(one), jnp.asarray(token, jnp.int32), count, keys)
    for b in range(B):
        want = 0
        while want < count[b] and token[b, want] == best[b, want]:
            want += 1
        assert (int(accepted[b]), int(last[b])) == (want, best[b, want])
