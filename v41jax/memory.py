"""Whether an engine fits the memory there is, said before it is made, with the longest context that would."""

import dataclasses
import os

import jax

from v41jax import config, slots
from v41jax.cache import bytes_per_token
from v41jax.config import Config
from v41jax.slots import Layout


def device_memory() -> int:
    """Bytes of the first device: what its allocator may use, or the machine's memory where it has no limit (CPU)."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return stats["bytes_limit"]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cache_bytes(cfg: Config, layout: Layout) -> int:
    """Bytes of all slots and of the row that takes prompts."""
    described = jax.eval_shape(lambda: (slots.empty_slots(cfg, layout), slots.empty_staged(cfg, layout)))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(described))


def largest_capacity(cfg: Config, layout: Layout, room: int) -> int:
    """The most tokens a sequence may hold so that the caches of the layout take at most `room` bytes; 0: none do."""
    multiple = config.group_multiple(cfg)
    least = max(2, multiple)
    fixed = cache_bytes(cfg, dataclasses.replace(layout, capacity=least))
    if fixed > room:
        return 0
    more = int((room - fixed) / (bytes_per_token(cfg) * (layout.slots + 1)))
    return min(least + more // multiple * multiple, cfg.max_position_embeddings)


def check(cfg: Config, layout: Layout, *, memory: int, weights: int, scratch: int = 0):
    """Raises ValueError if weights, caches and what programs need besides do not fit.

    Args:
      cfg, layout: the engine.
      memory: bytes there are.
      weights: bytes of the parameters.
      scratch: bytes that the largest program needs beside its arguments; known once it is compiled. It does not grow
        with the capacity beyond some 100 MB, as long work runs in blocks, so what is said to fit may be a little small.
    """
    needed = cache_bytes(cfg, layout)
    if weights + scratch + needed <= memory:
        return
    most = largest_capacity(cfg, layout, memory - weights - scratch)
    if most:
        advice = f"the largest capacity that fits is {most}; fewer slots leave room for more"
    else:
        advice = "no capacity fits; take fewer slots, or a larger device"
    raise ValueError(
        f"capacity={layout.capacity} tokens in {layout.slots} slots and a row for prompts take {needed} bytes beside"
        f" {weights} of weights and {scratch} for working; there are {memory}: {advice}"
    )
