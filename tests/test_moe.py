"""Router, tiles and experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import vectors
from jaxprs import result_shapes

from pallas_kernels.expert_matmul import reference
from v41jax import config, moe, quant

GATE_RTOL = 2e-6  # float32: softplus, root, a sum of six and a division
SCORE_ATOL = 1e-22  # the 1e-20 beside the sum of scores hides what is smaller; float32 references underflow to 0
EXPERT_RTOL = 5e-6  # of the largest output, float32: three products of up to 64 channels

quantize = jax.jit(quant.quantize, static_argnums=1)
cfg = dataclasses.replace(config.tiny, n_routed_experts=6)
D, F = cfg.hidden_size, cfg.moe_intermediate_size


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def choose(logits, bias, top, **changes):
    own = dataclasses.replace(cfg, **changes)
    return jax.jit(functools.partial(moe.choose, top=top, cfg=own))(logits, bias)


# ---- router


@pytest.mark.parametrize("x64", [False, True])
def test_choose_equals_the_release(x64):
    golden = vectors()
    with jax.enable_x64(x64):
        got = choose(golden["gate.logits"], golden["gate.bias"], 6)
    assert (got.expert.dtype, got.weight.dtype) == (jnp.int32, jnp.float32)
    order, right = np.argsort(got.expert, axis=-1), np.argsort(golden["gate.experts"], axis=-1)
    sort = np.take_along_axis
    np.testing.assert_array_equal(sort(np.asarray(got.expert), order, -1), sort(golden["gate.experts"], right, -1))
    want = sort(golden["gate.weights"], right, -1)
    np.testing.assert_allclose(sort(np.asarray(got.weight), order, -1), want, rtol=GATE_RTOL, atol=SCORE_ATOL)


@pytest.mark.parametrize("scoring", ["sqrtsoftplus", "sigmoid", "softmax"])
@pytest.mark.parametrize("top,normalize", [(1, True), (3, True), (3, False)])
def test_choose_equals_the_oracle(scoring, top, normalize):
    rng = np.random.default_rng(top)
    logits, bias = normal(rng, 8, 6) * 3, normal(rng, 6)
    got = choose(logits, bias, top, scoring_func=scoring, norm_topk_prob=normalize, routed_scaling_factor=2.5)
    for t in range(8):
        expert, weight = oracle.route(logits[t], bias, top, scoring=scoring, normalize=normalize, factor=2.5)
        np.testing.assert_array_equal(got.expert[t], expert)
        np.testing.assert_allclose(got.weight[t], weight, rtol=GATE_RTOL)


def test_the_bias_chooses_but_does_not_weigh():
    logits, bias = np.array([[2.0, 1.0, 0.0, -1.0]], np.float32), np.array([0, 0, 0, 10], np.float32)
    got = choose(logits, bias, 2)
    np.testing.assert_array_equal(got.expert, [[3, 0]])
    scores = np.sqrt(np.log1p(np.exp([-1.0, 2.0])))
    np.testing.assert_allclose(got.weight[0], scores / scores.sum() * 1.5, rtol=GATE_RTOL)


def test_equal_scores_go_to_the_lower_expert():
    logits, bias = jnp.zeros((5, 384)), jnp.zeros(384)
    run = functools.partial(moe.choose, top=6, cfg=cfg)
    one = lambda logits: run(logits[None], bias).expert[0]  # noqa: E731
    for fn in (lambda logits: run(logits, bias).expert, jax.vmap(one)):
        np.testing.assert_array_equal(jax.jit(fn)(logits), np.tile(np.arange(6), (5, 1)))


@pytest.mark.parametrize("logit", [-20.0, -104.0, -200.0, 90.0])
def test_extreme_logits_keep_their_scores_and_finite_gradients(logit):
    logits, bias = jnp.full((1, 6), logit), jnp.zeros(6)
    own = dataclasses.replace(cfg, norm_topk_prob=False, routed_scaling_factor=1.0)
    scores = lambda x: moe.choose(x, bias, top=2, cfg=own).weight  # noqa: E731
    got, slope = jax.jit(scores)(logits), jax.jit(jax.grad(lambda x: scores(x).sum()))(logits)
    exact = np.sqrt(np.log1p(np.exp(-abs(logit))) + max(logit, 0.0))
    np.testing.assert_allclose(got, np.full((1, 2), exact), rtol=GATE_RTOL, atol=SCORE_ATOL)
    right = 1 / (1 + np.exp(-logit)) / (2 * exact)
    np.testing.assert_allclose(slope, [[right] * 2 + [0] * 4], rtol=GATE_RTOL, atol=SCORE_ATOL)
    assert np.isfinite(choose(logits, bias, 2).weight).all()


def test_naive_softplus_values():
    got = choose(jnp.full((1, 6), -20.0), jnp.zeros(6), 1, routed_scaling_factor=1.0).weight
    np.testing.assert_allclose(got, [[4.54e-5]], rtol=1e-3)  # the digits printed here; log(1 + exp(x)) gives 0


def test_route_scores_in_float32_at_the_gates_temperature():
    rng = np.random.default_rng(0)
    weight, x = normal(rng, 6, D), jnp.asarray(normal(rng, 4, D), jnp.bfloat16)
    params = {"weight": jnp.asarray(weight), "bias": jnp.zeros(6)}
    own = dataclasses.replace(cfg, gate_temp=4.0)
    got = jax.jit(functools.partial(moe.route, top=3, cfg=own))(params, x)
    for t in range(4):
        expert, weights = oracle.route(weight @ np.asarray(x[t], np.float32) / 4, np.zeros(6), 3)
        np.testing.assert_array_equal(got.expert[t], expert)
        np.testing.assert_allclose(got.weight[t], weights, rtol=4 * GATE_RTOL)  # and a product of 64 channels


# ---- tiles


@pytest.mark.parametrize("rows", [1, 2, 7, 100])
@pytest.mark.parametrize("experts", [1, 6, 50])
@pytest.mark.parametrize("spread", ["uniform", "skewed", "one"])
def test_tiles_hold_every_row_once_under_its_expert(rows, experts, spread):
    rng = np.random.default_rng(rows * experts)
    expert_N = {
        "uniform": rng.integers(0, experts, rows),
        "skewed": np.minimum(rng.geometric(0.5, rows) - 1, experts - 1),
        "one": np.full(rows, experts - 1),
    }[spread].astype(np.int32)
    tile = moe.tile_rows(rows, experts)
    got = jax.jit(functools.partial(moe.sort_to_tiles, experts=experts, tile=tile))(expert_N)
    expert_M, source_S, slot_N = (np.asarray(part) for part in got)
    assert all(part.dtype == np.int32 for part in (expert_M, source_S, slot_N))
    assert expert_M.size <= min(rows, rows // tile + experts)
    assert source_S.size == expert_M.size * tile
    np.testing.assert_array_equal(source_S[slot_N], np.arange(rows))  # so all slots differ
    np.testing.assert_array_equal(expert_M[slot_N // tile], expert_N)
    assert (source_S == rows).sum() == source_S.size - rows
    used = np.zeros(expert_M.size, bool)
    used[slot_N // tile] = True
    np.testing.assert_array_equal(expert_M >= 0, used)  # the others are empty, so that no weight is read for them


def test_the_worst_spread_fits_its_tiles():
    # One row in every expert but one, which takes the rest: the most part-filled tiles there can be.
    expert_N = np.array([0, 1, 2, 3, 4] + [5] * 19, np.int32)
    for tile in (1, 4, 16):
        sort = jax.jit(functools.partial(moe.sort_to_tiles, experts=6, tile=tile))
        _, source_S, slot_N = sort(expert_N)
        np.testing.assert_array_equal(np.asarray(source_S)[np.asarray(slot_N)], np.arange(24))


def test_tile_rows():
    assert [moe.tile_rows(rows, 384) for rows in (1, 6, 384, 385, 768, 769, 10**6)] == [1, 1, 1, 2, 2, 4, 128]


# ---- experts


def layer(rng, experts, dtype=jnp.float32, *, quantized=False):
    """Random weights; also what they are once decoded: router, bias, routed and shared experts."""
    own = dataclasses.replace(cfg, n_routed_experts=experts, quantized=quantized)
    shapes = {"w1": (F, D), "w2": (D, F), "w3": (F, D)}
    routed = {name: normal(rng, experts, *shape) / 8 for name, shape in shapes.items()}
    shared = {name: normal(rng, *shape) / 8 for name, shape in shapes.items()}
    gate, bias = normal(rng, experts, D) / 4, normal(rng, experts) / 4
    plain = (gate, bias, routed, shared)

    def store(weight, format):
        return jnp.asarray(weight, dtype) if format is None else quantize(weight, format)

    params = {
        "gate": {"weight": jnp.asarray(gate, dtype), "bias": jnp.asarray(bias)},
        "experts": {name: store(w, own.expert_format) for name, w in routed.items()},
        "shared_experts": {name: store(w, own.dense_format) for name, w in shared.items()},
    }
    return params, plain, own


def run_oracle(plain, x, own):
    gate, bias, routed, shared = plain
    each = [tuple(routed[name][e] for name in ("w1", "w2", "w3")) for e in range(len(gate))]
    shared = tuple(shared[name] for name in ("w1", "w2", "w3"))
    limit = own.swiglu_limit
    return oracle.moe(x, gate, bias, each, shared, top=own.num_experts_per_tok, limit=limit)


def run(params, x, own):
    return jax.jit(functools.partial(moe.moe, top=own.num_experts_per_tok, cfg=own))(params, x)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=EXPERT_RTOL * np.abs(want).max())


@pytest.mark.parametrize("tokens,experts", [(1, 6), (2, 50), (7, 6), (100, 6), (40, 3)])
def test_moe_equals_the_oracle(tokens, experts):
    rng = np.random.default_rng(tokens)
    params, plain, own = layer(rng, experts)
    x = normal(rng, 1, tokens, D) * 3  # large enough to be clipped at swiglu_limit
    y, routes = run(params, x, own)
    close(y[0], run_oracle(plain, x[0], own))
    assert routes.expert.shape == (1, tokens, own.num_experts_per_tok)


@pytest.mark.parametrize("limit", [0.0, 0.25])
def test_clipping_of_gate_and_up(limit):
    rng = np.random.default_rng(1)
    params, plain, own = layer(rng, 6)
    own = dataclasses.replace(own, swiglu_limit=limit)
    x = normal(rng, 1, 9, D) * 3
    close(run(params, x, own)[0][0], run_oracle(plain, x[0], own))


def test_stored_experts_equal_the_oracle_on_decoded_weights():
    rng = np.random.default_rng(2)
    params, (gate, bias, routed, shared), own = layer(rng, 6, quantized=True)
    routed = {n: np.stack([oracle.quantize(e, "fp4_e8m0_32")[2] for e in w]) for n, w in routed.items()}
    shared = {n: oracle.quantize(w, "fp8_e8m0_32x32")[2] for n, w in shared.items()}
    x = normal(rng, 1, 5, D)
    close(run(params, x, own)[0][0], run_oracle((gate, bias, routed, shared), x[0], own))


def test_batches_of_tiles_change_nothing(monkeypatch):
    rng = np.random.default_rng(3)
    params, _, own = layer(rng, 6)
    x = normal(rng, 2, 10, D)
    whole, _ = run(params, x, own)
    for module, name, value in (
        (reference, "fitting", lambda nbytes: 1),
        (reference, "fitting", lambda nbytes: 5),
        (moe, "LARGEST_TILE", 1),
    ):
        monkeypatch.setattr(module, name, value)
        close(run(params, x, own)[0], whole)


def test_experts_that_nobody_chose_do_not_matter():
    rng = np.random.default_rng(4)
    params, _, own = layer(rng, 50)
    x = normal(rng, 1, 3, D)
    y, routes = run(params, x, own)
    unused = ~np.isin(np.arange(50), routes.expert)
    poisoned = {n: jnp.where(unused[:, None, None], jnp.nan, w) for n, w in params["experts"].items()}
    np.testing.assert_array_equal(run(params | {"experts": poisoned}, x, own)[0], y)


def test_no_work_is_done_for_all_experts():
    experts = 53  # a number no other dimension has
    params, _, own = layer(np.random.default_rng(5), experts)
    shapes = result_shapes(functools.partial(moe.moe, top=2, cfg=own), params, jnp.ones((1, 3, D)))
    assert not [s for s in shapes if experts in s and (F in s or s[-1] == D)]
    tiles = jax.eval_shape(functools.partial(moe.sort_to_tiles, experts=experts, tile=1), jnp.zeros(6, jnp.int32))
    assert tiles.expert_M.size == 6
    assert (6, F, D) in shapes  # six tiles gather their own experts' weights


@pytest.mark.parametrize("quantized", [False, True])
def test_bfloat16_in_and_out_with_float32_routes(quantized):
    params, _, own = layer(np.random.default_rng(6), 6, jnp.bfloat16, quantized=quantized)
    y, routes = jax.eval_shape(functools.partial(moe.moe, top=2, cfg=own), params, jnp.ones((1, 3, D), jnp.bfloat16))
    assert (y.dtype, routes.expert.dtype, routes.weight.dtype) == (jnp.bfloat16, jnp.int32, jnp.float32)


def test_x64_changes_no_bit():
    rng = np.random.default_rng(7)
    params, _, own = layer(rng, 6)
    x = normal(rng, 1, 20, D)
    y, _ = run(params, x, own)
    with jax.enable_x64(True):
        wide, routes = run(params, x, own)
    assert (wide.dtype, routes.weight.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(wide, y)


def test_specs_never_quantise_the_router():
    specs = moe.specs(config.v41_flash, 384)
    assert [specs["gate"][name].format for name in ("weight", "bias", "bias_vl")] == [None] * 3
    assert specs["gate"]["bias"].dtype == "float32"
    assert {spec.format for spec in specs["experts"].values()} == {"fp4_e8m0_32"}
    assert {spec.format for spec in specs["shared_experts"].values()} == {"fp8_e8m0_32x32"}
