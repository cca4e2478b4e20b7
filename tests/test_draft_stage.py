"""The stage that trains drafts: what moves, what does not, what it learns, and who is refused."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sessions import MICRO, spread
from test_training_forward import alone, master, packed, weights

from v41jax import config, drafts, init_cache, model
from v41jax.training import drafts as training
from v41jax.training import finetune, forward, qat, step
from v41jax.training.optimizer import make_optimizer
from v41jax.training.settings import Settings, Stage, from_dict

PACKED = 2e-5  # of the hidden states' deviation: float32 sums in another order, through two layers
ORDER = 1e-4  # of a gradient's largest value: float32 sums of other sizes, in another order
CFG = dataclasses.replace(
    MICRO,
    num_hidden_layers=2,
    compress_ratios=(0, 1),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,),
    candidate_source_layer_id=None,
    num_nextn_predict_layers=2,
    dspark_target_layer_ids=(1,),
    dspark_noise_token_id=5,
)
QUANTIZED = dataclasses.replace(CFG, quantized=True, formats=config.Formats())
LENGTHS = ((30, 20), (40, 9))
STEPS = 20


def names(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in jax.tree.leaves_with_path(tree)
    }


@functools.cache
def trained():
    """Twenty steps on one batch, weights and caches rounded: before, after, metrics of every step."""
    batch, before = packed(QUANTIZED, lengths=LENGTHS, columns=64), master(QUANTIZED)
    stage = Stage(kind="drafts", steps=STEPS, learning_rate=3e-3, qat=True)
    settings = Settings(stages=(stage,), dtype="bfloat16", micro_batches=2)
    state, run = finetune.begin_stage(stage, jax.tree.map(jnp.copy, before), settings=settings, cfg=QUANTIZED)
    history = []
    for _ in range(STEPS):
        state, metrics = run(state, batch)
        history.append({name: np.asarray(value) for name, value in metrics.items()})
    return names(before), names(state.params), history


def test_the_backbone_is_frozen_to_the_bit():
    before, after, _ = trained()
    for name, leaf in after.items():
        moved = not np.array_equal(leaf, before[name])
        untrained = name.endswith(("ffn.gate.bias", "confidence_head.proj"))
        assert moved == (name.startswith("mtp.") and not untrained), name


def test_drafts_learn():
    _, _, history = trained()
    assert history[-1]["loss"] < 0.7 * history[0]["loss"]  # the batch is learnt by heart
    for metrics in history:
        share_n = metrics["accepted_share"]
        assert share_n.shape == (QUANTIZED.dspark_block_size,)
        assert np.all(np.diff(share_n) <= 0) and 0 <= share_n.min() and share_n.max() <= 1  # a prefix only shrinks
        np.testing.assert_allclose(metrics["accepted"], share_n.sum(), rtol=ORDER)
        assert set(metrics) == {"loss", "accepted", "accepted_share", "gradient_norm"}


@functools.partial(jax.jit, static_argnames=("cfg", "options"))
def gradients(params, batch, *, cfg, options):
    return step.total_gradients(params, batch, cfg=cfg, options=options)


def test_the_backbone_has_no_gradient_and_micro_batches_are_one_batch():
    batch = packed(CFG, lengths=((13, 6), (2,), (24,), (3, 1, 4)), columns=32)
    options = step.Options(stage="drafts")
    got, sums = gradients(master(CFG), batch, cfg=CFG, options=options)
    for name, gradient in names(got).items():
        assert name.startswith("mtp.") or not np.any(gradient), name
    parts, part_sums = gradients(master(CFG), batch, cfg=CFG, options=dataclasses.replace(options, micro_batches=2))
    np.testing.assert_array_equal(sums.predicted_n, part_sums.predicted_n)
    for a, b in zip(jax.tree.leaves(parts), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(a, b, atol=ORDER * max(1e-3, float(np.abs(b).max(initial=0))))


def test_hidden_states_are_those_of_inference():
    batch, w = packed(CFG, lengths=LENGTHS, columns=64), weights(CFG)
    documents = forward.Documents(jnp.asarray(batch["document_BT"]))
    got = jax.jit(lambda w, t: forward.run(w, t, documents, cfg=CFG, hidden=True).hidden_BTM)(w, batch["tokens_BT"])
    tokens, where = alone(batch)
    lengths = jnp.array([len(at) for _, at in where], jnp.int32)

    @jax.jit
    def inference(w, tokens):
        cache = init_cache(CFG, *tokens.shape)
        _, _, records = model.run(w, cache, tokens, lengths, cfg=CFG, mode="full", read="all")
        return drafts.main_hidden(w, records, cfg=CFG)[0]

    want = inference(w, tokens)
    for row, (b, at) in enumerate(where):
        assert spread(got[b, at], want[row, : len(at)]) < PACKED


def test_accepted_is_the_prefix_that_the_backbone_would_say():
    batch, w = packed(CFG, lengths=LENGTHS, columns=64), weights(CFG)
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(*batch["tokens_BT"].shape, CFG.hidden_size)).astype(np.float32)

    @jax.jit
    def run(best_BT):
        return training.draft_loss(w, hidden, best_BT, batch, cfg=CFG)

    counts = np.asarray(run(jnp.full(batch["tokens_BT"].shape, -1, jnp.int32)).accepted_n)
    np.testing.assert_array_equal(counts, 0)  # no token is -1
    total_V = sum(
        np.asarray(run(jnp.full(batch["tokens_BT"].shape, token, jnp.int32)).accepted_n[0])
        for token in range(CFG.vocab_size)
    )
    assert total_V == run(jnp.zeros(batch["tokens_BT"].shape, jnp.int32)).predicted_n[0]  # one token is the best


def test_qat_rounds_draft_stages_too():
    rng = np.random.default_rng(0)
    params = {
        "mtp": jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), master(QUANTIZED)["mtp"])
    }
    params = {**master(QUANTIZED), **params}
    weigh = jax.jit(
        lambda params, weights: qat.compute_weights(params, cfg=QUANTIZED, dtype=jnp.float32, weights=weights)["mtp"],
        static_argnums=1,
    )
    exact, given = names(weigh(params, True)), names(params["mtp"])
    rounded = {name for name, leaf in exact.items() if not np.array_equal(leaf, given[name])}
    assert {"0.main_proj", "0.attn.wq_a", "1.ffn.experts.w1", "1.ffn.shared_experts.w2"} <= rounded
    assert not [name for name in rounded if "norm" in name or ".gate" in name or "head" in name or "hc_" in name]


def test_a_model_without_draft_stages_is_refused_before_any_work(tmp_path):
    start = finetune.Start(MICRO, {}, tmp_path, None)
    settings = Settings(stages=(Stage(name="behind", kind="drafts"),))
    with pytest.raises(ValueError, match=r"stage 'behind' trains drafts, but .* has num_nextn_predict_layers=0; leave"):
        finetune.finetune(start, settings, output=tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_an_unknown_kind_of_stage_is_refused():
    with pytest.raises(ValueError, match=re.escape("kind='draft'; legal are dense, warmup, sparse, drafts")):
        from_dict({"stages": [{"kind": "draft"}]})


def test_only_draft_stages_are_given_to_the_optimizer():
    stage = Stage(kind="drafts")
    state = make_optimizer(stage, master(CFG), cfg=CFG, weight_decay=0.1).init(master(CFG))
    sizes = sum(leaf.size for leaf in jax.tree.leaves(state))
    assert sizes < 2.1 * sum(leaf.size for leaf in jax.tree.leaves(master(CFG)["mtp"]))
