"""One description per weight, from which initial values, abstract targets, shardings and file names derive.

Every part of the model lists its weights as a nested dict of `ArraySpec`; the parameters are the same dict with arrays
(or `Packed`) at the leaves. Joined with dots, a leaf's path is its name in the released checkpoint.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from v41jax import quant


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArraySpec:
    """One weight, or the same weight of all experts stacked."""

    shape: tuple[int, ...]  # logical: unpacked, [out, in] as released
    axes: tuple[str | None, ...]  # what each dimension counts, for sharding rules
    init: str | Callable = "normal"  # "normal" (std fan_in^-0.5), "unit" (std 1), "zeros", "ones", or shape -> array
    format: str | None = None  # block format it is stored in: a key of quant.FORMATS
    dtype: str | None = None  # fixed dtype; None: the dtype the caller computes in
    suffix: str = ".weight"  # ends its name in a checkpoint; scales end in ".scale"
    per_expert: bool = False  # the first dimension is one released tensor per expert
    released: bool = True  # False: derived when loading, not a tensor of the checkpoint

    def __post_init__(self):
        assert len(self.shape) == len(self.axes), self

    def abstract(self, dtype) -> Any:
        """Describes the array as a ShapeDtypeStruct, or a Packed of two."""
        if self.format is not None:
            return quant.abstract(self.shape, self.format)
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype or dtype))


Specs = dict[str, Any]  # nested dicts and lists of ArraySpec


def is_spec(leaf: Any) -> bool:
    """Tells a leaf of Specs."""
    return isinstance(leaf, ArraySpec)


def map_specs(fn: Callable[[ArraySpec], Any], specs: Specs) -> Any:
    """Maps every ArraySpec, keeping the nesting."""
    return jax.tree.map(fn, specs, is_leaf=is_spec)


def walk(specs: Specs) -> Iterator[tuple[str, ArraySpec]]:
    """Yields ("layers.3.attn.wq_a", spec) for every weight."""
    for path, spec in jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec):
        yield ".".join(str(getattr(k, "key", getattr(k, "idx", None))) for k in path), spec


def unflatten(specs: Specs, leaves: dict[str, Any]) -> Any:
    """Builds the tree of `specs` from a dict of dotted paths to leaves."""
    structure = jax.tree.structure(specs, is_leaf=is_spec)
    return jax.tree.unflatten(structure, [leaves[path] for path, _ in walk(specs)])


def abstract(specs: Specs, dtype) -> Any:
    """Describes the parameters: ShapeDtypeStructs, and Packed of them, in place of arrays."""
    return map_specs(lambda spec: spec.abstract(dtype), specs)


def initialize(specs: Specs, key: jax.Array, dtype) -> Any:
    """Draws random parameters; a weight's values depend on the key and on its place among the specs."""
    leaves = {}
    for number, (path, spec) in enumerate(walk(specs)):
        leaves[path] = _draw(spec, jax.random.fold_in(key, number), dtype)
    return unflatten(specs, leaves)


def _draw(spec: ArraySpec, key, dtype):
    if callable(spec.init):
        return spec.init(spec.shape)
    if spec.init in ("zeros", "ones"):
        value = jnp.full(spec.shape, float(spec.init == "ones"), jnp.float32)
    else:
        std = 1.0 if spec.init == "unit" else spec.shape[-1] ** -0.5
        value = jax.random.normal(key, spec.shape, jnp.float32) * jnp.float32(std)
    if spec.format is not None:
        return quant.quantize(value, spec.format)
    return value.astype(spec.dtype or dtype)


def parameter_count(specs: Specs) -> int:
    """Counts the logical values of the released weights, scales not among them."""
    return sum(math.prod(spec.shape) for _, spec in walk(specs) if spec.released)


def nbytes(params: Any) -> int:
    """Bytes of all arrays (or ShapeDtypeStructs) in a tree, packed planes as stored."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(params))
