"""Optimizers: who trains what, one Muon step against NumPy, the schedule."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from v41jax import config, model, tree
from v41jax.training import optimizer
from v41jax.training.settings import Stage

pytestmark = pytest.mark.usefixtures("quick_compilation")

CFG = dataclasses.replace(  # few layers, a draft stage, two shapes of most weights
    config.tiny,
    num_hidden_layers=4,
    compress_ratios=(0, 2, 1, 1, 0),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2),
    candidate_source_layer_id=2,
    engram_layer_ids=(1,),
    engram_num_embeddings=(462,),
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(2, 3),
    quantized=False,
)
STAGE = Stage(steps=10, learning_rate=0.02)
NAMES = [name for name, _ in tree.walk(model.specs(CFG))]

STEP_ERROR = 2e-5  # ten float32 Newton-Schulz steps on matrices of at most 64; the updates are of size 0.1 to 1
RMS_ERROR = 0.02  # what ten Newton-Schulz steps leave of singular values off 1, for gradients of full rank


def weights(seed: int):
    """Random values in the shapes of the master weights, Engram tables unpacked."""
    specs = model.specs(CFG)
    draw = np.random.default_rng(seed)
    arrays = {
        name: jnp.arange(spec.shape[0], dtype=jnp.int32)
        if spec.dtype == "int32"
        else jnp.asarray(draw.standard_normal(spec.shape), jnp.float32)
        for name, spec in tree.walk(specs)
    }
    return tree.unflatten(specs, arrays)


def leaves(params):
    return {optimizer.path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


PARAMS, GRADS = weights(0), weights(1)
GRADS = {**GRADS, "token_map": jnp.zeros_like(PARAMS["token_map"])}


@functools.cache
def prepare(stage=STAGE, weight_decay=0.1):
    """The first state, and a compiled update."""
    transformation = optimizer.make_optimizer(stage, PARAMS, cfg=CFG, weight_decay=weight_decay)
    return jax.jit(transformation.init)(PARAMS), jax.jit(transformation.update)


@functools.cache
def updates(stage=STAGE, scale=1.0, steps=1, weight_decay=0.1):
    """The last of some steps with one gradient, times `scale`."""
    state, step = prepare(stage, weight_decay)
    grads = jax.tree.map(lambda x: x if x.dtype == jnp.int32 else x * jnp.float32(scale), GRADS)
    for _ in range(steps):
        out, state = step(grads, state, PARAMS)
    return leaves(out)


# ---- who trains what


def test_every_parameter_has_one_rule():
    rules = leaves(optimizer.labels(PARAMS, kind="sparse"))
    assert rules.keys() == set(NAMES)
    moved = {name for name, update in updates().items() if np.any(update)}
    assert moved == {name for name, label in rules.items() if label != "fixed"}


@pytest.mark.parametrize(
    "name, label",
    [
        ("embed", "embedding"),
        ("head", "embedding"),
        ("norm", "vector"),
        ("token_map", "fixed"),
        ("layers.1.engram.embed", "table"),
        ("layers.1.engram.wkv", "muon"),
        ("layers.1.engram.q_weight", "vector"),
        ("layers.0.hc_attn_fn", "muon"),
        ("layers.0.hc_attn_base", "vector"),
        ("layers.0.hc_attn_scale", "vector"),
        ("layers.0.attn_norm", "vector"),
        ("layers.0.attn.attn_sink", "vector"),
        ("layers.0.attn.wq_a", "muon"),
        ("layers.0.attn.wkv", "muon"),
        ("layers.1.attn.compressor.wgate", "muon"),
        ("layers.1.attn.indexer.weights_proj", "muon"),
        ("layers.1.attn.indexer.k_norm", "vector"),
        ("layers.0.ffn.gate.weight", "muon"),
        ("layers.0.ffn.gate.bias", "fixed"),
        ("layers.0.ffn.experts.w1", "muon"),
        ("mtp.0.main_proj", "fixed"),
    ],
)
def test_rules_by_name(name, label):
    assert leaves(optimizer.labels(PARAMS, kind="sparse"))[name] == label


def test_only_indexers_move_while_the_main_model_is_frozen():
    out = updates(dataclasses.replace(STAGE, kind="warmup"))
    moved = {name for name, update in out.items() if np.any(update)}
    assert moved == {name for name in NAMES if ".attn.indexer." in name} != set()


# ---- one step


def newton_schulz(matrix):
    x = matrix / np.linalg.norm(matrix)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 8 + [(2.0, -1.5, 0.5)] * 2:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon_oracle(gradient, weight, parts):
    """The first step in float64: with bias correction, Nesterov momentum of one gradient is a multiple of it."""
    out = np.empty(gradient.shape)
    for rows in np.split(np.arange(gradient.shape[0]), parts):
        matrix = gradient[rows]
        out[rows] = newton_schulz(matrix) * 0.18 * np.sqrt(max(matrix.shape))
    return -0.02 * (out + 0.1 * weight)


@pytest.mark.parametrize(
    "name, parts",
    [
        ("layers.0.attn.wq_b", CFG.num_attention_heads),
        ("layers.1.attn.indexer.wq_b", CFG.index_n_heads),
        ("layers.1.attn.indexer.wk", 1),
        ("layers.0.attn.wkv", 1),
        ("layers.0.attn.wo_a", CFG.o_groups),
        ("layers.1.engram.wkv", CFG.hc_mult + 1),
        ("layers.0.hc_attn_fn", 1),
    ],
)
def test_a_muon_step_takes_each_head_on_its_own(name, parts):
    gradient, weight = (np.asarray(leaves(tree)[name], np.float64) for tree in (GRADS, PARAMS))
    want = muon_oracle(gradient, weight, parts)
    np.testing.assert_allclose(updates()[name], want, atol=STEP_ERROR)
    if parts > 1:
        assert np.abs(want - muon_oracle(gradient, weight, 1)).max() > 100 * STEP_ERROR


@pytest.mark.parametrize("name", ["layers.0.ffn.experts.w1", "layers.3.ffn.experts.w2"])
def test_each_expert_is_a_matrix(name):
    gradient, weight = (np.asarray(leaves(tree)[name], np.float64) for tree in (GRADS, PARAMS))
    want = np.stack([muon_oracle(g, w, 1) for g, w in zip(gradient, weight, strict=True)])
    np.testing.assert_allclose(updates()[name], want, atol=STEP_ERROR)


def test_momentum_is_nesterov_with_bias_correction():
    name, beta = "layers.0.attn.wkv", 0.95
    first, second = (np.asarray(leaves(weights(seed))[name], np.float64) for seed in (1, 2))
    state, step = prepare(STAGE, 0.0)
    for grads in (GRADS, {**weights(2), "token_map": GRADS["token_map"]}):
        out, state = step(grads, state, PARAMS)
    momentum = beta * (1 - beta) * first + (1 - beta) * second
    ahead = beta * momentum / (1 - beta**3) + (1 - beta) * second / (1 - beta**2)
    want = -0.02 * 0.18 * np.sqrt(max(first.shape)) * newton_schulz(ahead)
    np.testing.assert_allclose(leaves(out)[name], want, atol=STEP_ERROR)


def test_updates_have_the_root_mean_square_of_the_report():
    out, rules = updates(weight_decay=0.0), leaves(optimizer.labels(PARAMS, kind="sparse"))
    for name, update in out.items():
        if rules[name] == "muon":
            rms = np.sqrt(np.mean(np.square(update))) / 0.02
            assert abs(rms / optimizer.UPDATE_RMS - 1) < RMS_ERROR, name


def test_the_rest_is_adamw():
    out = updates()
    sign = {name: np.sign(np.asarray(leaf, np.float64)) for name, leaf in leaves(GRADS).items()}
    norm, embed, table = "layers.0.attn_norm", "embed", "layers.1.engram.embed"
    np.testing.assert_allclose(out[norm], -0.02 * sign[norm], rtol=1e-5)  # of float32: the first step is the sign
    want = -0.02 * (sign[embed] + 0.1 * np.asarray(leaves(PARAMS)[embed], np.float64))
    np.testing.assert_allclose(out[embed], want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(out[table], -0.02 * 5 * sign[table], rtol=1e-5)


def test_what_has_no_gradient_stays_where_it_is():
    for name, update in updates(scale=0.0, steps=3, weight_decay=0.0).items():
        assert not np.any(update), name


def test_tiny_gradients_count():
    # eps is 1e-20: gradients of 1e-12 move a norm as far as any other.
    np.testing.assert_allclose(updates(scale=1e-12)["norm"], updates()["norm"], rtol=1e-5)


# ---- schedule


def test_the_schedule_warms_up_holds_decays_and_holds():
    stage = Stage(steps=100, learning_rate=2.0, warmup_steps=10, decay_steps=40, final_steps=20)
    rate = [float(optimizer.schedule(stage)(step)) for step in range(101)]
    np.testing.assert_allclose(rate[:11], np.linspace(0, 2, 11), rtol=1e-6)
    assert rate[10:41] == [2.0] * 31
    cosine = 2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * np.arange(40) / 40)))
    np.testing.assert_allclose(rate[40:80], cosine, rtol=1e-6)
    np.testing.assert_allclose(rate[80:], 0.2, rtol=1e-6)


def test_a_schedule_may_be_constant_alone():
    rate = optimizer.schedule(Stage(steps=5, learning_rate=0.5))
    assert [float(rate(step)) for step in range(6)] == [0.5] * 6


def test_the_state_counts_every_step():
    state, step = prepare(Stage(steps=4, warmup_steps=4, learning_rate=1.0, kind="warmup"), 0.0)
    params, moves, name = PARAMS, [], "layers.1.attn.indexer.k_norm"
    for _ in range(3):
        out, state = step(GRADS, state, params)
        moves.append(float(jnp.abs(leaves(out)[name]).max()))
        params = optax.apply_updates(params, out)
    np.testing.assert_allclose(moves, [0, 0.25, 0.5], rtol=1e-5)
