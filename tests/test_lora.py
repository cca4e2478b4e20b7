"""Low-rank adapters: they begin as the model to the bit, nothing else moves, and they are exported as one weight."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SCRIPTS
from test_draft_stage import QUANTIZED, names
from test_training_forward import packed

from v41jax import model, quant, tree
from v41jax.quant import Packed
from v41jax.training import export, finetune, forward, lora, qat
from v41jax.training.settings import Settings, Stage

RANK, STEPS = 4, 8
LENGTHS = ((30, 20), (40, 9))


@functools.cache
def stored():
    return model.init_params(QUANTIZED, jax.random.key(0))


def adapted():
    return lora.adapt(jax.tree.map(jnp.copy, stored()), cfg=QUANTIZED, rank=RANK, seed=0)


@functools.cache
def trained():
    stage = Stage(steps=STEPS, learning_rate=1e-2, qat=True)
    state, run = finetune.begin_stage(stage, adapted(), settings=Settings(stages=(stage,)), cfg=QUANTIZED)
    batch, losses = packed(QUANTIZED, lengths=LENGTHS, columns=64), []
    for _ in range(STEPS):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
    return state.params, losses


def test_a_run_begins_with_the_model_to_the_bit():
    batch = packed(QUANTIZED, lengths=LENGTHS, columns=64)

    @functools.partial(jax.jit, static_argnames="rounded")
    def logits(params, rounded):
        w = qat.compute_weights(params, cfg=QUANTIZED, dtype=jnp.bfloat16, weights=rounded)
        return forward.logits(w, batch, cfg=QUANTIZED)[0]

    want = logits(export.to_master(stored()), False)
    np.testing.assert_array_equal(logits(adapted(), True), want)


def test_only_adapters_move_and_they_learn():
    params, losses = trained()
    before = names(adapted())
    assert losses[-1] < 0.98 * losses[0]
    for name, leaf in names(params).items():
        trains = name.endswith(lora.TRAINED) and not name.startswith("mtp.")
        assert np.array_equal(leaf, before[name]) != trains, name


def test_adapters_are_exported_as_the_weight_that_was_trained():
    params, _ = trained()
    got = export.to_release(params, cfg=QUANTIZED)
    structure = jax.tree.structure(tree.abstract(model.specs(QUANTIZED), "bfloat16"))
    assert jax.tree.structure(got) == structure
    w = qat.compute_weights(params, cfg=QUANTIZED, dtype=jnp.float32, weights=True)
    both = zip(*(jax.tree.leaves(some, is_leaf=lora.is_stored) for some in (got, w, stored())), strict=True)
    changed = 0
    for exported, computed, base in both:
        if isinstance(computed, lora.Adapted):
            want = lora.merge(computed, jnp.float32)
            np.testing.assert_array_equal(quant.dequantize(exported, jnp.float32), want)
            changed += not np.array_equal(quant.dequantize(base, jnp.float32), want)
        elif isinstance(base, Packed) and isinstance(computed, Packed):
            np.testing.assert_array_equal(exported.codes, base.codes)
            np.testing.assert_array_equal(exported.scales, base.scales)
    assert changed >= 2 * 5  # of two layers, at least the attention projections


def test_a_rank_that_no_weight_has_is_refused():
    with pytest.raises(ValueError, match=re.escape("lora_rank=999; layers.0.attn.") + r"\w+ is \d+ x \d+, so legal"):
        lora.adapt(stored(), cfg=QUANTIZED, rank=999, seed=0)


def test_settings_choose_adapters():
    start = finetune.load_start(SCRIPTS / "micro", seed=0, lora_rank=2)
    assert lora.is_adapted(start.params) and not lora.is_adapted(finetune.load_start(SCRIPTS / "micro", seed=0).params)
    with pytest.raises(ValueError, match="lora_rank=-1; it must be 0 or more"):
        Settings(lora_rank=-1)
