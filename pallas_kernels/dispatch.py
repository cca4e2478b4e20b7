"""The one rule that picks a backend, and the one way to run an operation under a mesh.

By default each platform gets its kernel and everything else the reference; a backend chosen by name runs or raises.

Only lowering knows the platform, so an operation is one primitive until then, and lowering traces one backend: tracing
the kernels of every platform takes longer than tracing the model.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping

import jax
from jax.custom_batching import sequential_vmap
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

log = logging.getLogger(__name__)

PLATFORM = {"mosaic_tpu": "tpu", "mosaic_gpu": "cuda"}
HOPPER = 9  # the kernels use wgmma, which only compute capability 9 has
_DEFAULT = jax.make_user_context()


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
    chosen = chosen or _DEFAULT.value
    if chosen is not None:
        if chosen not in backends:
            raise ValueError(f"{name} has no backend {chosen!r}; it has {', '.join(sorted(backends))}")
        return _jitted(backends[chosen], **static)(*arrays)
    leaves, tree = jax.tree.flatten(arrays)
    reference = _of_leaves(_jitted(backends["reference"], **static), tree)
    kernels = {PLATFORM[b]: _of_leaves(_jitted(backends[b], **static), tree) for b in backends.keys() & PLATFORM.keys()}
    kernels = tuple((platform, _one_by_one(kernel)) for platform, kernel in sorted(kernels.items()))
    by_platform = functools.partial(run_p.bind, name=name, reference=reference, kernels=kernels)
    out_tree = jax.tree.structure(jax.eval_shape(_jitted(backends["reference"], **static), *arrays))
    return jax.tree.unflatten(out_tree, _with_gradient_of(reference, by_platform)(*leaves))


@contextlib.contextmanager
def default(backend: str) -> Iterator[None]:
    """Makes `backend` what every operation traced inside runs, or raises; what was jitted outside is traced anew."""
    with _DEFAULT(backend):
        yield


def per_shard(fn: Callable, mesh, in_specs, out_specs) -> Callable:
    """Wraps `fn` so that each device of `mesh` runs it on its own shard: kernels cannot be partitioned by XLA.

    Every operation's leading axes (sequences, rows, tiles) may be sharded freely: its results do not depend on it.
    """
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


run_p = Primitive("run_by_platform")  # flat arrays; name, reference, kernels: ((platform, kernel), ...)
run_p.multiple_results = True


def serving(platform: str, avals, *, name: str, reference: Callable, kernels) -> Callable:
    """Returns what runs on `platform`: its kernel where it serves arrays like `avals`, else the reference."""
    kernel = dict(kernels).get(platform)
    if kernel is None:
        return reference
    if platform == "cuda" and (major := cuda_major()) is not None and major != HOPPER:
        _say(name, platform, f"it needs compute capability {HOPPER}.x, this GPU has {major}.x")
        return reference
    try:
        jax.eval_shape(kernel, *avals)
    except NotImplementedError as refusal:
        _say(name, platform, str(refusal))
        return reference
    return kernel


@run_p.def_impl
def _run_eagerly(*leaves, **params):
    return _compiled(**params)(*leaves)


@run_p.def_abstract_eval
def _result_types(*avals, reference, **_):
    return jax.make_jaxpr(reference)(*avals).out_avals


def _lower(ctx, *leaves, platform, **params):
    return mlir.lower_fun(serving(platform, ctx.avals_in, **params))(ctx, *leaves)


def _batch(leaves, axes, *, name, reference, kernels):
    kernels = tuple((platform, _mapped(kernel, tuple(axes))) for platform, kernel in kernels)
    results = run_p.bind(*leaves, name=name, reference=_mapped(reference, tuple(axes)), kernels=kernels)
    return results, [0] * len(results)


batching.primitive_batchers[run_p] = _batch
for _platform in ("cpu", "rocm", *PLATFORM.values()):
    mlir.register_lowering(run_p, functools.partial(_lower, platform=_platform), _platform, inline=False)


def _with_gradient_of(reference: Callable, fn: Callable) -> Callable:
    """Gives `fn` the gradient of `reference`, which is computed again for it: kernels have none of their own."""

    def backward(arrays, cotangents):
        return jax.vjp(reference, *arrays)[1](cotangents)

    differentiable = jax.custom_vjp(fn)
    differentiable.defvjp(lambda *arrays: (fn(*arrays), arrays), backward)
    return differentiable


@functools.cache
def cuda_major() -> int | None:
    """The least major compute capability of this process's CUDA devices; None where there are none."""
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        return None
    return min(int(str(device.compute_capability).split(".")[0]) for device in devices)


# Cached, so that JAX sees the same function again and does not trace it again.


@functools.cache
def _jitted(backend: Callable, **static) -> Callable:
    return jax.jit(functools.partial(backend, **static))


@functools.cache
def _compiled(**params) -> Callable:
    return jax.jit(functools.partial(run_p.bind, **params))


@functools.cache
def _of_leaves(fn: Callable, tree) -> Callable:
    return lambda *leaves: jax.tree.leaves(fn(*jax.tree.unflatten(tree, leaves)))


@functools.cache
def _one_by_one(kernel: Callable) -> Callable:
    return sequential_vmap(kernel)


@functools.cache
def _mapped(fn: Callable, axes: tuple) -> Callable:
    return jax.jit(jax.vmap(fn, in_axes=axes))


@functools.cache
def _say(name: str, platform: str, reason: str) -> None:
    log.info("%s: the kernel for %s refused, so the reference runs there: %s", name, platform, reason)
