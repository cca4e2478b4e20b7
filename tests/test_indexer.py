"""Index keys, scores, the candidate pool and the selection."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import vectors
from jaxprs import equations, indexed_axes, result_shapes

from pallas_kernels.block_max import block_max
from pallas_kernels.index_scores import index_scores
from pallas_kernels.index_scores import reference as score_reference
from pallas_kernels.masked_topk import masked_topk
from v41jax import cache, config, indexer, quant, rope
from v41jax.cache import Span
from v41jax.indexer import Selection

SCORE_RTOL = 1e-5  # float32 sums of heads x channels products, relative to the largest score
KEY_ATOL = 2e-6  # projection, norm and rotation in float32, of values up to 4

cfg = dataclasses.replace(config.tiny, formats=config.UNQUANTIZED, quantized=False)
PLAN = {layer.role: layer for layer in config.layer_plan(cfg)}
FREQUENCY = rope.layer_frequencies(cfg, compressed=True)


quantize = jax.jit(quant.quantize, static_argnums=1)


def plain(x):
    """Unquantised keys in a Packed."""
    return quantize(jnp.asarray(x, jnp.float32), None)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


@jax.jit
def scored(query, weight, keys):
    """Scores of all keys."""
    visible = jnp.full(weight.shape[:2], keys.codes.shape[1], jnp.int32)
    return index_scores(query, weight, keys.codes, keys.scales, visible, format=keys.format)


@functools.partial(jax.jit, static_argnames=("k", "size"))
def chosen(query, weight, keys, blocks, visible, k, size):
    own = dataclasses.replace(cfg, candidate_block_size=size)
    return indexer.select_in_blocks(query, weight, keys, blocks, visible, k=k, cfg=own)


def close(got, want):
    np.testing.assert_allclose(got, want, rtol=0, atol=SCORE_RTOL * np.abs(want).max())


# ---- scores


@pytest.mark.parametrize("weight,score", [([1, 1], 2), ([-1, 1], 2), ([1, -1], -2), ([-1, -1], -2)])
def test_relu_comes_before_the_head_weights(weight, score):
    query = np.zeros((1, 1, 2, 32), np.float32)
    query[0, 0, :, 0] = [-3, 2]
    key = np.zeros((1, 1, 32), np.float32)
    key[..., 0] = 1
    got = scored(jnp.asarray(query), jnp.array([[weight]], jnp.float32), plain(key))
    np.testing.assert_array_equal(got, [[[score]]])


@pytest.mark.parametrize("format", [None, "fp4_e8m0_32"])
@pytest.mark.parametrize("x64", [False, True])
def test_scores_equal_the_oracle(format, x64):
    rng = np.random.default_rng(0)
    query, weight, keys = normal(rng, 2, 5, 3, 64), normal(rng, 2, 5, 3), normal(rng, 2, 20, 64)
    with jax.enable_x64(x64):
        packed = quantize(jnp.asarray(keys), format)
        got = scored(query, weight, packed)
        assert got.dtype == jnp.float32
    decoded = keys if format is None else [oracle.quantize(k, format)[2] for k in keys]
    close(got, np.stack([oracle.index_scores(*each) for each in zip(query, weight, decoded, strict=True)]))


def test_scores_of_bfloat16_queries_are_float32_sums():
    rng = np.random.default_rng(1)
    query, weight, keys = (
        jnp.asarray(normal(rng, 1, 4, 2, 32), jnp.bfloat16),
        normal(rng, 1, 4, 2),
        normal(rng, 1, 9, 32),
    )
    packed = quantize(jnp.asarray(keys), "fp4_e8m0_32")
    got = scored(query, jnp.asarray(weight), packed)
    assert got.dtype == jnp.float32
    wide = np.asarray(query, np.float32)
    close(got[0], oracle.index_scores(wide[0], weight[0], oracle.quantize(keys[0], "fp4_e8m0_32")[2]))


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("tile", [1, 4, 7, 19, 20])
def test_key_tiles_change_nothing(monkeypatch, tile, size):
    rng = np.random.default_rng(2)
    query, weight = normal(rng, 2, 3, 2, 32), normal(rng, 2, 3, 2)
    keys = quantize(rng.integers(-3, 4, (2, 20, 32)).astype(np.float32), "fp4_e8m0_32")
    query, weight = np.round(query), np.round(weight * 4)  # small integers: sums are exact in any order
    visible = jnp.array([[20, 7, 0], [19, 12, 1]], jnp.int32)

    def run():
        scores = functools.partial(index_scores, format=keys.format, block_size=size)
        return jax.jit(lambda *a: scores(*a))(query, weight, keys.codes, keys.scales, visible)

    whole = run()
    monkeypatch.setattr(score_reference, "KEY_TILE", tile)
    monkeypatch.setattr(score_reference, "fitting", lambda nbytes: 2)
    np.testing.assert_array_equal(run(), whole)
    np.testing.assert_array_equal(whole, oracle.block_max(np.array(scored(query, weight, keys)), visible, size))


def test_queries_and_head_weights():
    rng = np.random.default_rng(3)
    params = {"wq_b": normal(rng, 64, 32), "weights_proj": normal(rng, 2, 64)}
    x, latent, position = normal(rng, 1, 4, 64), normal(rng, 1, 4, 32) / 8, np.array([[0, 1, 7, 90]], np.int32)

    @functools.partial(jax.jit, static_argnums=0)
    def queries(cfg):
        return indexer.index_queries(params, x, latent, jnp.asarray(position), frequency=FREQUENCY, cfg=cfg)

    query, weight = queries(cfg)
    for t in range(4):
        heads = (params["wq_b"] @ latent[0, t]).reshape(2, 32)
        turned = [oracle.rotate(head, position[0, t], FREQUENCY) for head in heads]
        np.testing.assert_allclose(query[0, t], turned, rtol=0, atol=KEY_ATOL)
    close(weight, x @ params["weights_proj"].T / np.sqrt(32 * 2))
    assert (weight < 0).any()

    packed = dataclasses.replace(cfg, formats=config.Formats())
    rounded, _ = queries(packed)
    want = oracle.quantize(np.asarray(query).reshape(-1, 32), "fp4_e8m0_32")[2].reshape(query.shape)
    np.testing.assert_array_equal(rounded, want)


def test_bfloat16_inputs():
    rng = np.random.default_rng(3)
    params = {"wq_b": normal(rng, 64, 32), "weights_proj": normal(rng, 2, 64), "wk": normal(rng, 32, 32)}
    params = {name: jnp.asarray(w, jnp.bfloat16) for name, w in params.items()}
    params["k_norm"] = jnp.ones(32, jnp.bfloat16)
    x, latent = jnp.ones((1, 4, 64), jnp.bfloat16), jnp.ones((1, 4, 32), jnp.bfloat16)
    position = jnp.zeros((1, 4), jnp.int32)
    where = {"frequency": FREQUENCY, "cfg": config.tiny}
    query, weight = jax.eval_shape(lambda: indexer.index_queries(params, x, latent, position, **where))
    assert (query.dtype, weight.dtype) == (jnp.bfloat16, jnp.float32)
    keys = jax.eval_shape(lambda: indexer.index_keys(params, latent, position, **where))
    assert keys.codes.dtype == keys.scales.dtype == jnp.uint8


def test_keys_equal_the_oracle():
    rng = np.random.default_rng(4)
    params = {"wk": normal(rng, 32, 32), "k_norm": normal(rng, 32)}
    latent, position = normal(rng, 1, 3, 32), jnp.array([[0, 2, 4]], jnp.int32)
    keys = jax.jit(lambda x: indexer.index_keys(params, x, position, frequency=FREQUENCY, cfg=cfg))(latent)
    for g in range(3):
        key = oracle.rms_norm(params["wk"] @ latent[0, g], params["k_norm"])
        np.testing.assert_allclose(keys.codes[0, g], oracle.rotate(key, 2 * g, FREQUENCY), rtol=0, atol=KEY_ATOL)


# ---- candidate pool


def candidates(scores, visible, block_size, keep):
    own = dataclasses.replace(cfg, candidate_block_size=block_size, candidate_topk_blocks=keep, index_topk=1)

    @jax.jit
    def run(scores, visible):
        return indexer.candidate_blocks(block_max(scores, visible, block_size=block_size), visible, cfg=own)

    return np.asarray(run(scores, visible))


@pytest.mark.parametrize("keep", [1, 2, 3, 6])
@pytest.mark.parametrize("x64", [False, True])
def test_candidates_equal_the_release(keep, x64):
    golden = vectors()
    scores, visible = golden["candidates.scores"], golden["candidates.visible"]
    with jax.enable_x64(x64):
        blocks = candidates(scores[None], visible[None], 8, keep)[0]
    assert blocks.dtype == np.int32
    masks = [oracle.pool_mask(set(kept), v, 8, 45) for kept, v in zip(blocks.tolist(), visible, strict=True)]
    np.testing.assert_array_equal(masks, golden[f"candidates.keep_{keep}"])


@pytest.mark.parametrize("entries,block_size,keep", [(13, 4, 2), (45, 8, 3), (16, 1, 5), (5, 8, 4), (33, 3, 4)])
def test_candidates_equal_the_oracle(entries, block_size, keep):
    rng = np.random.default_rng(entries)
    scores = rng.choice(np.array([-np.inf, -1, -0.0, 0.0, 1, np.nan], np.float32), (2, 20, entries))
    visible = rng.integers(0, entries + 1, (2, 20)).astype(np.int32)
    blocks = candidates(scores, visible, block_size, keep)
    width = min(keep, -(-entries // block_size))
    assert blocks.shape == (2, 20, width)
    for b, t in np.ndindex(2, 20):
        kept = oracle.candidate_blocks(scores[b, t], visible[b, t], block_size, keep)
        np.testing.assert_array_equal(blocks[b, t], kept + [-1] * (width - len(kept)))


def test_a_query_that_sees_nothing_has_an_empty_pool():
    blocks = candidates(jnp.ones((1, 1, 16)), jnp.zeros((1, 1), jnp.int32), 4, 3)
    np.testing.assert_array_equal(blocks, [[[-1, -1, -1]]])


def test_the_newest_block_is_kept_though_full_ones_score_more():
    scores = jnp.array([[[9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7, -5.0]]])
    blocks = candidates(scores, jnp.array([[13]], jnp.int32), 4, 2)
    np.testing.assert_array_equal(blocks, [[[0, 3]]])


def test_nan_takes_no_place_in_the_pool():
    inf, nan = np.inf, np.nan
    scores = jnp.array([[[1, 2, 3, 4, nan, 0, 0, 0, 5, 5, 5, 5, 1, -inf, -inf, -inf]]])
    blocks = candidates(scores, jnp.array([[13]], jnp.int32), 4, 2)
    np.testing.assert_array_equal(blocks, [[[2, 3]]])


def test_ragged_rows_never_return_what_they_do_not_have():
    scores = np.random.default_rng(5).standard_normal((3, 1, 13)).astype(np.float32)
    visible = np.array([[13], [5], [1]], np.int32)
    blocks = candidates(scores, visible, 4, 2)
    picked = np.asarray(masked_topk(jnp.asarray(scores), jnp.asarray(visible), k=13))
    np.testing.assert_array_equal(blocks[1:], [[[0, 1]], [[0, -1]]])
    assert 3 in blocks[0, 0]
    for row, count in zip(picked, (13, 5, 1), strict=True):
        np.testing.assert_array_equal(row[0], [*range(count), *[-1] * (13 - count)])


# ---- selection


@pytest.mark.parametrize("k", [1, 4, 8, 40])
@pytest.mark.parametrize("x64", [False, True])
def test_selection_in_the_pool_equals_masked_dense_scoring(k, x64):
    rng = np.random.default_rng(k)
    block_size, entries = 4, 30
    query = rng.integers(-1, 2, (2, 6, 2, 32)).astype(np.float32)  # integers: exact sums and very many ties
    weight = rng.integers(-1, 2, (2, 6, 2)).astype(np.float32)
    keys = plain(rng.integers(-1, 2, (2, entries, 32)) * (rng.random((2, entries, 1)) < 0.6))
    visible = rng.integers(0, entries + 1, (2, 6)).astype(np.int32)
    with jax.enable_x64(x64):
        source = rng.integers(0, 3, (2, 6, entries)).astype(np.float32)
        blocks = candidates(source, visible, block_size, 3)
        got = chosen(query, weight, keys, blocks, visible, k, block_size)
        dense = np.asarray(scored(query, weight, keys))
        assert got.dtype == jnp.int32
    for b, t in np.ndindex(2, 6):
        pool = oracle.pool_mask(set(blocks[b, t].tolist()), visible[b, t], block_size, entries)
        np.testing.assert_array_equal(got[b, t], oracle.top_k(np.where(pool, dense[b, t], -np.inf), k))


def test_pool_position_to_entry():
    keys = np.zeros((1, 64, 32), np.float32)
    keys[0, 59] = keys[0, 18] = 1
    blocks, visible = jnp.array([[[2, 7, -1]]], jnp.int32), jnp.array([[64]], jnp.int32)
    got = chosen(jnp.ones((1, 1, 1, 32)), jnp.ones((1, 1, 1)), plain(keys), blocks, visible, 2, 8)
    np.testing.assert_array_equal(got, [[[18, 7 * 8 + 3]]])
    everything = chosen(jnp.ones((1, 1, 1, 32)), jnp.ones((1, 1, 1)), plain(keys), blocks, visible, 24, 8)
    np.testing.assert_array_equal(everything[0, 0], [*range(16, 24), *range(56, 64), *[-1] * 8])


def test_entries_beyond_two_to_the_24_are_exact(monkeypatch):
    scores = jnp.array([[[0, 5, 5, 0, 5, 0, 1, 0.0]]])
    monkeypatch.setattr(indexer, "pool_scores", lambda *a, **k: scores)
    blocks = jnp.array([[[2**24 // 8 + 1]]], jnp.int32)
    keys = plain(np.zeros((1, 8, 32)))
    own = dataclasses.replace(cfg, candidate_block_size=8)
    got = indexer.select_in_blocks(None, None, keys, blocks, None, k=3, cfg=own)
    np.testing.assert_array_equal(got, [[[2**24 + 8 + 1, 2**24 + 8 + 2, 2**24 + 8 + 4]]])


def indexer_inputs(rng, tokens, entries):
    params = {"wq_b": normal(rng, 64, 32), "weights_proj": normal(rng, 2, 64)}
    params = {name: jnp.asarray(np.round(w)) for name, w in params.items()}
    x, latent = np.round(normal(rng, 2, tokens, 64)), np.round(normal(rng, 2, tokens, 32))
    keys = quantize(jnp.asarray(normal(rng, 2, entries, 32)), "fp4_e8m0_32")
    span = Span(jnp.array([9, 3], jnp.int32), jnp.array([tokens, tokens - 2], jnp.int32), tokens)
    return params, jnp.asarray(x), jnp.asarray(latent), keys, span


def run_select(inputs, carried, layer):
    params, x, latent, keys, span = inputs
    return jax.jit(
        lambda x, latent, keys, carried: indexer.select(
            params, x, latent, keys, carried, span=span, layer=layer, frequency=FREQUENCY, cfg=cfg
        )
    )(x, latent, keys, carried)


ENCODER = next(layer for layer in config.layer_plan(cfg) if layer.role is config.Role.FULL)
SOURCE = next(layer for layer in config.layer_plan(cfg) if layer.builds_candidates)
REINDEX = next(layer for layer in config.layer_plan(cfg) if layer.scores_candidates)


def test_select_builds_the_pool_and_later_layers_stay_inside():
    inputs = indexer_inputs(np.random.default_rng(6), 7, 20)
    span = inputs[-1]
    first = run_select(inputs, None, SOURCE)
    later = run_select(indexer_inputs(np.random.default_rng(7), 7, 20)[:3] + inputs[3:], first, REINDEX)
    np.testing.assert_array_equal(later.block_BTC, first.block_BTC)
    assert first.entry_BTK.shape == later.entry_BTK.shape == (2, 7, cfg.index_topk)
    for b, t in np.ndindex(2, 7):
        visible = (int(span.start_B[b]) + t + 1) if t < span.length_B[b] else 0
        pool = oracle.pool_mask(set(first.block_BTC[b, t].tolist()), visible, cfg.candidate_block_size, 20)
        for selection, allowed in ((first, np.arange(20) < visible), (later, pool)):
            entries = [e for e in selection.entry_BTK[b, t].tolist() if e >= 0]
            assert len(entries) == min(cfg.index_topk, allowed.sum())
            assert all(allowed[e] for e in entries)


@pytest.mark.parametrize("layer", [SOURCE, REINDEX])
@pytest.mark.parametrize("block", [1, 3])
def test_query_blocks_change_no_selection(monkeypatch, layer, block):
    inputs = indexer_inputs(np.random.default_rng(8), 7, 20)
    carried = run_select(inputs, None, SOURCE)
    whole = run_select(inputs, carried, layer)
    monkeypatch.setattr(indexer, "fitting", lambda nbytes: block)
    jax.tree.map(np.testing.assert_array_equal, run_select(inputs, carried, layer), whole)


@pytest.mark.parametrize("layer", [SOURCE, ENCODER])
def test_choosing_blocks_first_changes_no_selection(monkeypatch, layer):
    inputs = indexer_inputs(np.random.default_rng(11), 7, 4 * 20 + 3)
    whole = run_select(inputs, None, layer)
    monkeypatch.setattr(indexer, "FEW_BLOCKS", 0)
    assert cfg.index_topk < 83 // cfg.candidate_block_size
    jax.tree.map(np.testing.assert_array_equal, run_select(inputs, None, layer), whole)


def test_a_selection_is_as_wide_as_the_cache_at_most():
    inputs = indexer_inputs(np.random.default_rng(9), 3, 2)
    assert run_select(inputs, None, SOURCE).entry_BTK.shape == (2, 3, 2)


def test_a_reindex_layer_makes_nothing_of_the_contexts_size():
    entries = 4999  # a number no other dimension has
    inputs = indexer_inputs(np.random.default_rng(10), 3, entries)
    params, x, latent, keys, span = inputs
    carried = Selection(jnp.zeros((2, 3, 4), jnp.int32), jnp.zeros((2, 3, 3), jnp.int32))

    def select(keys, carried, layer):
        where = {"span": span, "layer": layer, "frequency": FREQUENCY, "cfg": cfg}
        return indexer.select(params, x, latent, keys, carried, **where)

    reindex = result_shapes(lambda keys, carried: select(keys, carried, REINDEX), keys, carried)
    source = result_shapes(lambda keys, carried: select(keys, carried, SOURCE), keys, carried)
    assert not [shape for shape in reindex if entries in shape]
    assert [shape for shape in source if entries in shape]


def test_keys_are_gathered_by_row_and_column():
    # A flat byte index would pass 2^31: 2143 blocks of 1,002,240 bytes already do.
    keys = jax.ShapeDtypeStruct((2143, 29000, 32), jnp.uint8)
    index = jax.ShapeDtypeStruct((2143, 1, 4), jnp.int32)
    gathers = [e for e in equations(cache.take_rows, keys, index) if e.primitive.name == "gather"]
    assert len(gathers) == 1
    assert indexed_axes(gathers[0]) == 2  # (sequence, row)


def test_specs_keep_head_weights_and_keys_in_high_precision():
    full, reindex = (indexer.specs(config.v41_flash, PLAN[role]) for role in (config.Role.FULL, config.Role.REINDEX))
    assert {name for name, spec in full.items() if spec.format} == {"wq_b"}
    assert set(full) - set(reindex) == {"wk", "k_norm"}
