"""Low-rank adapters for models too large for float32 masters: packed weights stay, small matrices beside them train.

A weight W [out, in] of `ADAPTED` computes as W + B A (LoRA, arXiv 2106.09685): W as the checkpoint has it, FP8, B [out,
r] and A [r, in] float32. B begins at 0, so a run begins with the model to the bit. Masters, gradients and optimizer
state exist for A and B alone. Packed weights are decoded a layer at a time, inside the layer's remat, and experts,
norms, Engram tables and embeddings are frozen. Exported, W + B A is one weight again, rounded as `quant` rounds.

qwix has LoRA for Flax modules: it replaces the `dot_general` of a module's parameters, and refuses anything else
("Unsupported model type"). This model is functions of a tree, and a packed weight is no operand of a `dot_general`.
"""

import dataclasses

import jax
import jax.numpy as jnp

from v41jax import model, quant, tree
from v41jax.config import Config
from v41jax.quant import Packed

ADAPTED = (
    *(f"attn.{name}" for name in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b", "indexer.wq_b")),
    *(f"shared_experts.{name}" for name in ("w1", "w2", "w3")),
    "main_proj",
)

TRAINED = ("lora_a", "lora_b")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Adapted:
    """A frozen weight [out, in] and what trains beside it, in its place in the parameters."""

    weight: Packed | jax.Array
    lora_a: jax.Array  # f32 [r, in]
    lora_b: jax.Array  # f32 [out, r]
    rounded: bool = dataclasses.field(default=False, metadata={"static": True})  # computes as a checkpoint stores it


def is_stored(leaf) -> bool:
    """Tells what is one weight of a model."""
    return isinstance(leaf, Adapted | Packed)


def is_adapted(params: model.Params) -> bool:
    """Whether adapters train, and nothing else."""
    return any(isinstance(leaf, Adapted) for leaf in jax.tree.leaves(params, is_leaf=is_stored))


def adapt(params: model.Params, *, cfg: Config, rank: int, seed: int) -> model.Params:
    """Puts adapters beside the weights of `ADAPTED`.

    Args:
      params: as loaded, packed where the config stores FP8 and FP4; not copied.
      cfg: static.
      rank: r, at most the smaller side of each of those weights.
      seed: of A, normal with deviation in^-0.5.
    Raises:
      ValueError: a rank that some weight does not have.
    """
    key = jax.random.key(seed)
    paths = [path for path, _ in tree.walk(model.specs(cfg))]
    specs = jax.tree.leaves(model.specs(cfg), is_leaf=tree.is_spec)
    leaves, structure = jax.tree.flatten(params, is_leaf=is_stored)
    assert len(leaves) == len(specs)
    for number, (path, spec) in enumerate(zip(paths, specs, strict=True)):
        if not path.endswith(ADAPTED):
            continue
        rows, columns = spec.shape
        if not 1 <= rank <= min(spec.shape):
            raise ValueError(f"lora_rank={rank}; {path} is {rows} x {columns}, so legal are 1 to {min(spec.shape)}")
        a = jax.random.normal(jax.random.fold_in(key, number), (rank, columns), jnp.float32)
        leaves[number] = Adapted(leaves[number], a * jnp.float32(columns**-0.5), jnp.zeros((rows, rank), jnp.float32))
    return jax.tree.unflatten(structure, leaves)


def merge(leaf, dtype):
    """Makes a plain weight of what `is_stored`; the frozen part gets no gradient. Other leaves pass unchanged."""
    if isinstance(leaf, Packed):
        return quant.dequantize(jax.lax.stop_gradient(leaf), dtype)
    if not isinstance(leaf, Adapted):
        return leaf
    weight = jax.lax.stop_gradient(leaf.weight)
    format = weight.format if isinstance(weight, Packed) else None
    weight = quant.dequantize(weight, jnp.float32) if isinstance(weight, Packed) else weight.astype(jnp.float32)
    delta = jnp.matmul(leaf.lora_b, leaf.lora_a, precision=jax.lax.Precision.HIGHEST)
    merged = weight + delta
    return (quant.fake_quantize(merged, format) if leaf.rounded else merged).astype(dtype)


def merge_layer(weights, dtype):
    """Merges what a layer has, Engram tables excepted, whose packed rows are looked up as they are."""

    def one(path, leaf):
        table = jax.tree_util.keystr(path, simple=True, separator=".").endswith("engram.embed")
        return leaf if table else merge(leaf, dtype)

    return jax.tree_util.tree_map_with_path(one, weights, is_leaf=is_stored)
