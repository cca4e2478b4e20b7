"""The weights a training step computes with: master weights, rounded to what a checkpoint will hold if QAT is on.

Caches and index queries are rounded by the model itself, as `cfg.formats` says. Which weights have a format is the
config's: experts FP4, dense projections FP8, Engram tables FP8; gate, norms, hyper-connections, sinks, compressors and
`weights_proj` have none.
"""

import dataclasses

import jax
import jax.numpy as jnp

from v41jax import config, model, quant, tree
from v41jax.config import Config
from v41jax.quant import Packed
from v41jax.training import lora


def compute_weights(master: model.Params, *, cfg: Config, dtype, weights: bool) -> model.Params:
    """Makes the weights of backbone and draft stages from float32 masters, differentiably.

    Args:
      master: plain arrays in the nesting of `model.specs`, or what `lora.adapt` makes.
      cfg: static.
      dtype: of the activations.
      weights: weight QAT: rounds what has a format, straight through (`quant.fake_quantize`).
    Returns:
      The weights in `dtype`, or float32 where the spec says so. An Engram table is a Packed of floats, whose rows are
      looked up as packed ones are. What a layer has packed or adapted stays so, for `lora.merge_layer`.
    """

    def one(path, spec: tree.ArraySpec, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if lora.is_stored(leaf):
            leaf = dataclasses.replace(leaf, rounded=weights) if isinstance(leaf, lora.Adapted) else leaf
            return leaf if name.startswith("layers.") else lora.merge(leaf, dtype)
        value = leaf
        if weights and spec.format:  # the barrier keeps XLA from rounding again in each product that reads it
            value = jax.lax.optimization_barrier(quant.fake_quantize(leaf, spec.format))
        value = value.astype(spec.dtype or dtype)
        if name.endswith("engram.embed"):
            return Packed(value, jnp.zeros((value.shape[0], 0), jnp.uint8), None)
        return value

    return jax.tree_util.tree_map_with_path(one, model.specs(cfg), master, is_leaf=tree.is_spec)


def without_quantized_caches(cfg: Config) -> Config:
    """The same model with window, entries and index keys kept in float32."""
    return dataclasses.replace(cfg, formats=config.UNQUANTIZED)
