"""Master weights from a model's parameters, and back to what a released checkpoint stores."""

import jax
import jax.numpy as jnp

from v41jax import model, quant, tree
from v41jax.config import Config
from v41jax.quant import Packed
from v41jax.training import lora


def to_master(params: model.Params) -> model.Params:
    """Decodes FP8 and FP4 weights and widens floats: every weight a float32 array; integers stay."""

    def widen(leaf):
        if isinstance(leaf, Packed):
            return quant.dequantize(leaf, jnp.float32)
        return leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(widen, params, is_leaf=lambda leaf: isinstance(leaf, Packed))


def to_release(master: model.Params, *, cfg: Config, dtype=jnp.bfloat16) -> model.Params:
    """Rounds master weights to the formats of the config; what it keeps in plain floats becomes `dtype`.

    Weights that QAT trained are rounded exactly as its forward pass rounded them. Adapters are merged first; beside
    them, what is packed stays as it is.
    """

    def narrow(spec: tree.ArraySpec, leaf):
        if isinstance(leaf, Packed):
            return leaf
        leaf = lora.merge(leaf, jnp.float32)
        return quant.quantize(leaf, spec.format) if spec.format else leaf.astype(spec.dtype or dtype)

    return jax.tree.map(narrow, model.specs(cfg), master, is_leaf=tree.is_spec)
