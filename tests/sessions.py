"""Ways to feed a model in tests, and to compare what is left in its cache."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import config, init_cache, load_checkpoint, model, prefill, quant
from v41jax.assets import BUILT_IN

GOLDEN = pathlib.Path(__file__).parent / "golden"
CHECKPOINTS = {"tiny-f32": GOLDEN / "tiny-f32", "tiny-fp8fp4": BUILT_IN}

MICRO = dataclasses.replace(  # every role once, nothing quantised; compiles fast
    config.tiny,
    num_hidden_layers=5,
    compress_ratios=(0, 2, 1, 1, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
    candidate_source_layer_id=2,
    sliding_window=4,
    engram_layer_ids=(1,),
    engram_num_embeddings=(462,),
    num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
    quantized=False,
    formats=config.UNQUANTIZED,
)

DRAFTING = dataclasses.replace(  # state of every kind, and a draft stage; the least that speculative decoding has
    MICRO,
    num_hidden_layers=3,
    compress_ratios=(0, 2, 1),
    index_source_layer_ids=(1, 2),
    num_nextn_predict_layers=1,
    dspark_target_layer_ids=(1, 2),
    dspark_noise_token_id=5,
)

run = jax.jit(model.run, static_argnames=("cfg", "mode", "read"))
decoded = jax.jit(functools.partial(quant.dequantize, dtype=jnp.float32))


@functools.cache
def load(name: str):
    """The (cfg, params) of a golden checkpoint in float32."""
    return load_checkpoint(CHECKPOINTS[name], dtype=jnp.float32)


def feed(params, prompts, *, cfg, width: int, mode="exact", capacity=128, padded: int | None = None):
    """Feeds prompts in chunks of `width` tokens, in calls of `padded` (None: `width`) columns; shorter rows wait.

    Returns each row's last logits [B, V] and the cache.
    """
    columns = padded or width
    cache = init_cache(cfg, len(prompts), capacity)
    logits = np.full((len(prompts), cfg.vocab_size), np.nan, np.float32)
    length_B = np.array([len(prompt) for prompt in prompts])
    for first in range(0, length_B.max(), width):
        lengths_B = np.clip(length_B - first, 0, width)
        tokens_BT = np.full((len(prompts), columns), cfg.vocab_size + 7)  # padding may hold anything
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : lengths_B[row]] = prompt[first : first + lengths_B[row]]
        part, cache = prefill(params, cache, tokens_BT, cfg=cfg, lengths_B=lengths_B, mode=mode)
        logits = np.where((lengths_B > 0)[:, None], part, logits)
    return logits, cache


def state(cache, row: int = 0):
    """Names every array of one row's state, dequantised, with what nothing may read cut off."""
    length = int(cache.length_B[row])
    out = {"length": np.array(length), "ngram": np.asarray(cache.ngram_BN[row])}
    for i, window in enumerate(cache.windows):
        out[f"window {i}"] = np.asarray(decoded(window))[row][: length or 1]
    for i, pool in enumerate(cache.pools):
        ratio = pool.partial_kv.shape[1] + 1
        for name in ("entries", "keys"):
            out[f"pool {i} {name}"] = np.asarray(decoded(getattr(pool, name)))[row, : length // ratio]
        out[f"pool {i} partial"] = np.stack([pool.partial_kv[row], pool.partial_gate[row]])
    return out


def spread(got, want) -> float:
    """The largest difference, in standard deviations of what is wanted."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max(initial=0) / want.std())
