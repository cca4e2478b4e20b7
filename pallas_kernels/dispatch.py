"""The one rule that picks a backend, and the one way to run an operation under a mesh.

By default each platform gets its kernel and everything else the reference; a backend chosen by name runs or raises.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.custom_batching import sequential_vmap

log = logging.getLogger(__name__)

PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "cuda"}
_DEFAULT: contextvars.ContextVar[str | None] = contextvars.ContextVar("default", default=None)
HOPPER = 9  # the kernels use wgmma, which only compute capability 9 has


def run(name: str, backends: Mapping[str, Callable], chosen: str | None, *arrays, **static):
    """Runs one operation.

    Args:
      name: of the operation, for messages.
      backends: "reference" and the kernels by the names in PLATFORM; a kernel raises NotImplementedError, while
        tracing, for what it cannot serve.
      chosen: the backend that must run; None: each platform's kernel where it serves, else the reference.
      arrays: traced arguments, trees of arrays or None. static: hashable ones.
    Raises:
      ValueError: no backend of that name. NotImplementedError: the named backend cannot serve these shapes.
    """
    chosen = chosen or _DEFAULT.get()
    if chosen is not None:
        if chosen not in backends:
            raise ValueError(f"{name} has no backend {chosen!r}; it has {', '.join(sorted(backends))}")
        return _jitted(backends[chosen], **static)(*arrays)
    branches = {}
    for backend in PLATFORM.keys() & backends.keys():
        if backend == "mosaic_gpu" and (major := cuda_major()) is not None and major != HOPPER:
            _say(name, backend, f"it needs compute capability {HOPPER}.x, this GPU has {major}.x")
            continue
        kernel = _jitted(backends[backend], **static)
        try:
            jax.eval_shape(kernel, *arrays)
        except NotImplementedError as refusal:
            _say(name, backend, str(refusal))
        else:
            branches[PLATFORM[backend]] = sequential_vmap(kernel)
    reference = functools.partial(backends["reference"], **static)
    return jax.lax.platform_dependent(*arrays, default=reference, **branches) if branches else reference(*arrays)


@contextlib.contextmanager
def default(backend: str) -> Iterator[None]:
    """Makes `backend` what every operation traced inside runs, or raises; jit anew, its cache does not see this."""
    token = _DEFAULT.set(backend)
    try:
        yield
    finally:
        _DEFAULT.reset(token)


def per_shard(fn: Callable, mesh, in_specs, out_specs) -> Callable:
    """Wraps `fn` so that each device of `mesh` runs it on its own shard: kernels cannot be partitioned by XLA.

    Every operation's leading axes (sequences, rows, tiles) may be sharded freely: its results do not depend on it.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


@functools.cache
def cuda_major() -> int | None:
    """The least major compute capability of this process's CUDA devices; None where there are none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return min(int(str(device.compute_capability).split(".")[0]) for device in devices)


@functools.cache
def _jitted(backend: Callable, **static) -> Callable:
    """One jitted function for each backend and set of static arguments, so that it is traced once for each shape."""
    return jax.jit(functools.partial(backend, **static))


@functools.cache
def _say(name: str, backend: str, reason: str) -> None:
    log.info("%s: %s refused, so the reference runs there: %s", name, backend, reason)
