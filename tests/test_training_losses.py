"""Losses and the teacher against their definitions, written as NumPy loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import result_shapes

from v41jax import quant
from v41jax.training import distill, losses
from v41jax.training.distill import Lesson, Pupil, Range

F32 = 2e-5  # relative to float64: sums of up to a few hundred float32 terms
NATS = 2e-5  # absolute, of a KL: logarithms near -70 are rounded by 4e-6 each


def oracle_teacher(query_NH, sink_N, window_WH, entry_EH, visible):
    """One query's teacher over visible entries: softmax with window and sink, summed over heads, sum 1."""
    mass = np.zeros(len(visible))
    for query, sink in zip(query_NH, sink_N, strict=True):
        near = [float(query @ row) * len(query) ** -0.5 for row in window_WH]
        far = [float(query @ entry_EH[e]) * len(query) ** -0.5 for e in visible]
        total = sum(np.exp(s) for s in [*near, *far, sink])
        mass += np.exp(far) / total
    return mass


def oracle_kl(mass, scores):
    p, q = mass / mass.sum(), np.exp(scores - scores.max())
    return float(np.sum(p * (np.log(p) - np.log(q / q.sum()))))


def lesson_arrays(seed, B=2, T=5, N=3, H=4, W=2, S=7, I=2, J=4):  # noqa: E741
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (B, T, N, H), "sink": (N,), "window": (B, T, H), "entry": (B, S, H),
        "index_query": (B, T, I, J), "weight": (B, T, I), "key": (B, S, J),
    }  # fmt: skip
    a = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    index = np.arange(T)[:, None] + np.arange(1 - W, 1)
    a["window_index"] = np.broadcast_to(np.where(index < 0, -1, index), (B, T, W)).astype(np.int32)
    first = rng.integers(0, 3, (B, T))
    a["first"], a["visible"] = first.astype(np.int32), (first + rng.integers(0, 4, (B, T))).astype(np.int32)
    a["visible"][0, 0] = 0  # sees nothing
    return a


def parts(a):
    lesson = Lesson(jnp.asarray(a["query"]), jnp.asarray(a["sink"]), quant.quantize(jnp.asarray(a["window"]), None))
    pupil = Pupil(*(jnp.asarray(a[name]) for name in ("index_query", "weight", "key")))
    return (
        lesson,
        pupil,
        quant.quantize(jnp.asarray(a["entry"]), None),
        Range(jnp.asarray(a["first"]), jnp.asarray(a["visible"])),
    )


def oracle_query(arrays, b, t, seen):
    """(teacher mass of each lesson summed, index scores) of one query over the entries `seen`."""
    mass = np.zeros(len(seen))
    for a in arrays:
        rows = [a["window"][b, i].astype(np.float64) for i in a["window_index"][b, t] if i >= 0]
        mass += oracle_teacher(a["query"][b, t].astype(np.float64), a["sink"], rows, arrays[0]["entry"][b], seen)
    a = arrays[0]
    dots = np.maximum(np.einsum("ij,sj->is", a["index_query"][b, t].astype(np.float64), a["key"][b][seen]), 0)
    return mass, a["weight"][b, t].astype(np.float64) @ dots


@pytest.mark.parametrize("teachers", [1, 3])
@pytest.mark.parametrize("dense", [True, False])
def test_kl_of_every_query(teachers, dense):
    arrays = [lesson_arrays(seed) for seed in range(teachers)]
    lessons = [parts(a)[0] for a in arrays]
    _, pupil, entries, seen = parts(arrays[0])
    a = arrays[0]
    rng = np.random.default_rng(9)
    chosen = np.full((2, 5, 3), -1, np.int32)
    for b, t in np.ndindex(2, 5):
        picked = np.arange(a["first"][b, t], a["visible"][b, t])
        picked = np.sort(rng.permutation(picked)[:2])
        chosen[b, t, : len(picked)] = picked
    if dense:
        got = distill.dense_kl(pupil, lessons, a["window_index"], entries, seen)
    else:
        got = distill.sparse_kl(pupil, lessons, a["window_index"], entries, jnp.asarray(chosen))
    for b, t in np.ndindex(2, 5):
        some = np.arange(a["first"][b, t], a["visible"][b, t]) if dense else chosen[b, t][chosen[b, t] >= 0]
        want = oracle_kl(*oracle_query(arrays, b, t, some)) if len(some) else 0.0
        if len(some) == 0:
            assert got[b, t] == 0
        np.testing.assert_allclose(got[b, t], want, atol=NATS)


def test_a_head_that_looks_at_the_window_teaches_little():
    # Two heads: one has 99 % of its mass in the window and the rest on entry 0, the other all of it on entry 1.
    near, big = float(np.log(99.0)), 60.0
    query = jnp.array([[[[1.0, 0, 0, 0], [0, 1.0, 0, 0]]]])
    window = quant.quantize(jnp.array([[[2 * near, -2 * big, 0, 0]]]), None)  # scores are dots / 2
    entries = quant.quantize(jnp.array([[[0, -2 * big, 0, 0], [-2 * big, 2 * big, 0, 0]]]), None)
    lesson = Lesson(query, jnp.full((2,), -200.0), window)
    seen = jnp.ones((1, 1, 2), bool)
    mass = distill.log_mass([lesson], jnp.zeros((1, 1, 1), jnp.int32), entries.codes, seen)
    np.testing.assert_allclose(np.exp(mass[0, 0]), [0.01, 1.0], rtol=F32)


@pytest.mark.parametrize("scale", [1.0, 1e-8, 1e-12, 1e-30])
def test_kl_does_not_depend_on_the_size_of_masses(scale):
    mass = np.array([0.5, 0.3, 1e-9]) * scale
    scores = np.array([0.1, -2.0, 3.0], np.float32)
    got = losses.kl(jnp.log(jnp.asarray(mass, jnp.float32)), jnp.asarray(scores), jnp.ones(3, bool))
    np.testing.assert_allclose(got, oracle_kl(mass.astype(np.float64), scores.astype(np.float64)), atol=NATS)


@pytest.mark.parametrize("junk", [0.0, -np.inf, np.inf, np.nan])
def test_a_row_that_sees_nothing_has_no_loss_and_no_gradient(junk):
    seen = jnp.array([[[False] * 3, [True, False, True]]])
    mass = jnp.where(seen, -1.0, junk)
    value, gradient = jax.value_and_grad(lambda s: losses.kl(mass, jnp.where(seen, s, junk), seen).sum())(
        jnp.arange(6.0).reshape(1, 2, 3)
    )
    assert np.isfinite(value) and value > 0
    assert np.array_equal(gradient[0, 0], [0, 0, 0])
    assert gradient[0, 1, 1] == 0 and gradient[0, 1, 0] != 0


def test_kl_gradient_is_softmax_minus_teacher():
    mass, scores = np.array([0.2, 0.5, 0.3]), np.array([1.0, -1.0, 0.5])
    got = jax.grad(lambda s: losses.kl(jnp.log(jnp.asarray(mass, jnp.float32)), s, jnp.ones(3, bool)))(
        jnp.asarray(scores, jnp.float32)
    )
    np.testing.assert_allclose(got, np.exp(scores) / np.exp(scores).sum() - mass, atol=NATS)


@pytest.mark.parametrize("block", [2, 5], ids=["blocks", "whole"])
def test_attend_all_is_attention_over_every_visible_entry_with_its_gradients(block, monkeypatch):
    from pallas_kernels.gather_attention import gather_attention

    monkeypatch.setattr(distill, "fitting", lambda nbytes: block)
    a = lesson_arrays(4, W=3)
    count = np.array([[1, 1, 0, 2, 3], [1, 2, 3, 1, 2]], np.int32)  # of the rows that end in the query's own
    index = np.arange(5)[:, None] + np.arange(-2, 1)
    index = np.where(np.arange(2, -1, -1) < count[..., None], index, -1).astype(np.int32)
    lesson, _, entries, seen = parts(a)
    every = jnp.where(seen.seen(7), jnp.arange(7, dtype=jnp.int32), -1)
    floats = lesson.query_BTNH, lesson.sink_N, lesson.window.codes, entries.codes

    def gathered(query, sink, window, rows):
        planes = (window, lesson.window.scales), index, (rows, entries.scales), every
        return gather_attention(query, sink, *planes, scale=0.5, window_format=None)

    def all_(query, sink, window, rows):
        return distill.attend_all(query, sink, window, count, rows, seen, slots=3)

    weights = jnp.cos(jnp.arange(lesson.query_BTNH.size, dtype=jnp.float32)).reshape(lesson.query_BTNH.shape)
    for fn in (lambda f: f, lambda f: jax.grad(lambda *x: (f(*x) * weights).sum(), argnums=(0, 1, 2, 3))):
        got, want = (fn(f)(*floats) for f in (all_, gathered))
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=NATS), got, want)


def test_recall_counts_the_mass_of_the_heaviest():
    a = lesson_arrays(2)
    a["first"][:], a["visible"][:] = 1, 7
    lesson, _, entries, seen = parts(a)
    chosen = np.array([[[1, 4], [2, -1], [5, 6], [1, 2], [3, 4]]] * 2, np.int32)
    got, counts = distill.recall([lesson], a["window_index"], entries, jnp.asarray(chosen), seen)
    assert counts.all()
    for b, t in np.ndindex(2, 5):
        mass, _ = oracle_query([a], b, t, np.arange(1, 7))
        held = sum(mass[e - 1] for e in chosen[b, t] if e >= 0)
        np.testing.assert_allclose(got[b, t], held / np.sort(mass)[-2:].sum(), rtol=F32)


@pytest.mark.parametrize("columns", [7, 2 * losses.TOKEN_BLOCK + 5])
def test_language_model_loss(columns):
    rng = np.random.default_rng(columns)
    x, head = rng.normal(size=(2, columns, 6)).astype(np.float32), rng.normal(size=(11, 6)).astype(np.float32)
    tokens = rng.integers(0, 11, (2, columns)).astype(np.int32)
    predicted = rng.random((2, columns)) < 0.7
    predicted[:, -1] = False
    want = 0.0
    for b, t in zip(*np.nonzero(predicted), strict=True):
        logits = head.astype(np.float64) @ x[b, t].astype(np.float64)
        want += np.log(np.exp(logits).sum()) - logits[tokens[b, t + 1]]
    np.testing.assert_allclose(losses.language_model(x, head, tokens, predicted), want, rtol=F32)


def test_no_array_of_all_logits():
    T, V = 4 * losses.TOKEN_BLOCK, 977
    args = [jax.ShapeDtypeStruct(s, d) for s, d in [((1, T, 6), "float32"), ((V, 6), "float32"), ((1, T), "int32")]]
    shapes = result_shapes(jax.grad(losses.language_model, argnums=(0, 1)), *args, jax.ShapeDtypeStruct((1, T), "bool"))
    widest = max(int(np.prod(s)) for s in shapes if V in s)
    assert widest == losses.TOKEN_BLOCK * V


def test_balance_loss_of_every_document():
    import sessions

    rng = np.random.default_rng(0)
    E, K = sessions.MICRO.n_routed_experts, 2
    logits = rng.normal(size=(2, 8, E)).astype(np.float32)
    expert = np.argsort(rng.random((2, 8, E)))[..., :K].astype(np.int32)
    document = np.array([[0, 0, 0, 1, 1, -1, -1, -1], [0, -1, -1, 3, 3, 3, 3, 3]], np.int32)
    got, load = losses.balance(logits, expert, document, cfg=sessions.MICRO)
    want, want_load = 0.0, np.zeros(E)
    for b in range(2):
        for d in range(4):
            at = np.flatnonzero(document[b] == d)
            if len(at):
                score = np.sqrt(np.log1p(np.exp(logits[b, at].astype(np.float64))))
                share = (score / score.sum(-1, keepdims=True)).mean(0)
                count = np.bincount(expert[b, at].ravel(), minlength=E)
                want += len(at) * np.sum(count * E / (K * len(at)) * share)
                want_load += count
    np.testing.assert_allclose(got, want, rtol=F32)
    assert np.array_equal(load, want_load)
