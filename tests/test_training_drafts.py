"""The loss of the draft stages: what inference drafts, who gets a gradient, and which."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from test_drafts import CFG, random_hidden, random_params
from test_training_forward import packed

from pallas_kernels import dispatch
from pallas_kernels.gather_attention.reference import EXACT
from v41jax import drafts
from v41jax.cache import Span
from v41jax.training import drafts as training

LENGTHS = ((9, 6), (1, 2, 7))
COLUMNS = 24
FLOAT_TOLERANCE = 1e-5  # relative: float32 sums of a few hundred nats in another order
STEP = 1e-6  # moves no route
FINITE = 1e-5  # relative, of a central difference: what cubic terms leave
FLOOR = 1e-7  # absolute: losses near 100, sums of 1e4 terms, are rounded by 1e-13 and divided by STEP
UNTRAINED = ("ffn.gate.bias", "confidence_head.proj")


def inputs():
    batch = packed(CFG, lengths=LENGTHS, columns=COLUMNS)
    return batch, random_hidden(*batch["tokens_BT"].shape)


def best(batch):
    return jnp.zeros(batch["tokens_BT"].shape, jnp.int32)


def test_the_loss_is_that_of_what_inference_drafts(monkeypatch):
    monkeypatch.setattr(training, "ANCHOR_BLOCK", 5)
    batch, hidden = inputs()
    got = jax.jit(functools.partial(training.draft_loss, cfg=CFG))(random_params(), hidden, best(batch), batch)
    n, rows, follow = CFG.dspark_block_size, [], []
    for b, document in enumerate(batch["document_BT"]):
        for number in np.unique(document[document >= 0]):
            at = np.flatnonzero(document == number)
            for p in range(len(at) - 1):  # each token but the last heads a block, as a sequence of its own
                rows.append((np.resize(hidden[b, at], (COLUMNS, hidden.shape[-1])), p + 1))
                follow.append(np.pad(batch["tokens_BT"][b, at[p + 1 : p + 2 + n]], (0, n), constant_values=-1)[: n + 1])
    follow = np.stack(follow)
    rings = drafts.init_draft_cache(CFG, len(rows))
    span = Span(rings.length_B, jnp.array([length for _, length in rows], jnp.int32), COLUMNS)
    forced = jnp.asarray(np.maximum(follow, 0), jnp.int32)

    @jax.jit
    def alone(params, hidden):
        seeded = drafts.seed(params, rings, hidden, span, cfg=CFG)
        return drafts.draft(params, seeded, forced[:, 0], cfg=CFG, sample=lambda _, i: forced[:, i + 1])

    out = alone(random_params(), np.stack([row for row, _ in rows]))
    logits = np.asarray(out.logits_BTV, np.float64)
    nats = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, np.asarray(forced)[:, 1:, None], -1)[..., 0]
    counts = follow[:, 1:] >= 0
    np.testing.assert_array_equal(got.predicted_n, counts.sum(0))
    np.testing.assert_array_equal(counts.sum(0), [4 + 7 + 5, 3 + 6 + 4, 2 + 5 + 3])
    np.testing.assert_allclose(got.loss_n, (nats * counts).sum(0), rtol=FLOAT_TOLERANCE)


def test_the_backbone_gets_no_gradient():
    batch, hidden = inputs()

    def loss(params, hidden):
        return training.draft_loss(params, hidden, best(batch), batch, cfg=CFG).loss_n.sum()

    gradients, of_hidden = jax.jit(jax.grad(loss, argnums=(0, 1), allow_int=True))(random_params(), jnp.asarray(hidden))
    assert not np.any(of_hidden)
    for path, leaf in jax.tree.leaves_with_path(gradients):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if leaf.dtype == jax.dtypes.float0 or not leaf.size:
            continue
        assert np.isfinite(leaf).all(), name
        assert bool(np.any(leaf)) == (name.startswith("mtp.") and not name.endswith(UNTRAINED)), name


def test_gradients_against_finite_differences(monkeypatch):
    batch, hidden = inputs()
    start = random_params()
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), dispatch.default("reference"):
        monkeypatch.setattr(jnp, "float32", jnp.float64)  # what the code does in float32 it does in float64 here
        monkeypatch.setitem(EXACT, "preferred_element_type", jnp.float64)
        rng = np.random.default_rng(1)

        def double(leaf):
            return leaf.astype(np.float64) if jnp.issubdtype(leaf.dtype, np.floating) else leaf

        values = jax.tree.map(double, jax.tree.map(np.asarray, start))
        fixed = {name: value for name, value in values.items() if name != "mtp"}

        def loss(stages):
            whole = {**fixed, "mtp": stages}
            return training.draft_loss(whole, hidden.astype(np.float64), best(batch), batch, cfg=CFG).loss_n.mean()

        gradient, value = jax.jit(jax.grad(loss))(values["mtp"]), jax.jit(loss)
        flat, structure = jax.tree.flatten(values["mtp"])
        checked = 0
        for i, (path, got) in enumerate(jax.tree.leaves_with_path(gradient)):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            if name.endswith(UNTRAINED):
                continue
            direction = rng.normal(size=got.shape)
            up, down = (
                float(
                    value(jax.tree.unflatten(structure, [*flat[:i], flat[i] + sign * STEP * direction, *flat[i + 1 :]]))
                )
                for sign in (1, -1)
            )
            want = (up - down) / (2 * STEP)
            np.testing.assert_allclose(np.vdot(got, direction), want, rtol=FINITE, atol=FLOOR, err_msg=name)
            checked += 1
        assert checked > 40
    jax.clear_caches()
