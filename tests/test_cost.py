"""What decode costs, by the compiler's own count: a Reindex layer's work does not grow with the context."""

import dataclasses

import jax
import jax.numpy as jnp
import jaxprs
import numpy as np
import pytest

from v41jax import config, init_cache, init_params, layer_plan, model
from v41jax.cache import Span
from v41jax.indexer import Selection

CFG = dataclasses.replace(config.tiny, index_topk=16, candidate_topk_blocks=128, candidate_block_size=8)
SOURCE, REINDEX = 4, 6


# Heads as the kernels serve them.
RELEASED_HEADS = {name: getattr(config.v41_flash, name) for name in (
    "num_attention_heads", "head_dim", "qk_rope_head_dim", "index_n_heads", "index_head_dim"
)}  # fmt: skip


def lower_decode(layer: int, capacity: int, cfg=CFG, dtype=jnp.float32):
    """Describes one layer's decode step on abstract arrays; a candidate source's entries of this call included."""
    params = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    cache = jax.eval_shape(lambda: init_cache(cfg, 1, capacity))
    spec, D, Z = layer_plan(cfg)[layer], cfg.hidden_size, cfg.hc_mult

    def step(weights, streams, pre, block_BTC, window, pool, start_B):
        selection = Selection(jnp.zeros((1, 1, cfg.index_topk), jnp.int32), block_BTC)
        span = Span(start_B, jnp.ones_like(start_B), 1)
        flow = model.Flow(streams, pre, selection, ())
        record, window, pool = model.run_layer(
            weights, flow, window, pool, span=span, held_B=start_B, first_B=jnp.zeros_like(start_B), keeps=1,
            layer=spec, cfg=cfg,
        )  # fmt: skip
        return record.flow, window

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    arrays = (
        params["layers"][layer], shape(1, 1, Z, D, dtype=dtype), shape(1, 1, Z), shape(1, 1, 128, dtype=jnp.int32),
        cache.windows[layer], cache.pools[spec.pool], shape(1, dtype=jnp.int32),
    )  # fmt: skip
    return step, arrays


def costs(layer: int, capacity: int):
    """(FLOPs, bytes) of the program as written and as compiled, and the bytes of the pool it reads from."""
    step, arrays = lower_decode(layer, capacity)
    lowered = jax.jit(step).lower(*arrays)
    both = [lowered.cost_analysis(), lowered.compile().cost_analysis()]
    written, compiled = (np.array([c["flops"], c["bytes accessed"]]) for c in both)
    pool = jax.eval_shape(lambda: init_cache(CFG, 1, capacity)).pools[layer_plan(CFG)[layer].pool]
    return written, compiled, pool.entries.nbytes + pool.keys.nbytes


def test_reindex_decode_is_flat_in_the_context():
    small, large = (costs(REINDEX, times * CFG.pool_size) for times in (2, 8))
    np.testing.assert_array_equal(small[0], large[0])  # a gather costs the rows it takes
    # The CPU compiler wraps every gather in a fusion and charges a fusion for the whole of what it reads from: each
    # plane of the pool once, and nothing else, makes the difference.
    np.testing.assert_array_equal(small[1] - [0, small[2]], large[1] - [0, large[2]])


def test_candidate_source_decode_grows_with_the_context():
    small, large = (costs(SOURCE, times * CFG.pool_size) for times in (2, 8))
    assert (large[0] > 2 * small[0]).all()
    assert (large[1] > 2 * small[1]).all()


def context_sized(layer, capacity, platform="cpu", **how):
    """Shapes of results with an axis of all entries or of all blocks."""
    step, arrays = lower_decode(layer, capacity, **how)
    sizes = {capacity, capacity // CFG.candidate_block_size}
    return {s for s in jaxprs.result_shapes(step, *arrays, platform=platform) if sizes & set(s)}


@pytest.mark.parametrize("capacity", [2400, 9600])
def test_reindex_makes_no_array_of_the_contexts_size(capacity):
    assert not context_sized(REINDEX, capacity)
    assert context_sized(SOURCE, capacity)  # the test sees what it looks for


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_reindex_kernels_make_no_array_of_the_contexts_size(platform):
    capacity, cfg = 4992, dataclasses.replace(CFG, **RELEASED_HEADS)  # whole tiles, and a number nothing else has
    how = {"platform": platform, "cfg": cfg, "dtype": jnp.bfloat16}
    found = context_sized(REINDEX, capacity, **how)
    if platform == "tpu":
        # These kernels want channels before entries: copies, 100 bytes an entry, that the law should not have to allow.
        pool = jax.eval_shape(lambda: init_cache(cfg, 1, capacity)).pools[layer_plan(cfg)[REINDEX].pool]
        found -= {(1, p.shape[2], capacity) for p in (pool.entries.scales, pool.keys.codes, pool.keys.scales)}
        found -= {p.shape for p in (pool.entries.codes, pool.entries.scales)}  # padded by nothing
    assert not found
    assert context_sized(SOURCE, capacity, **how)
