"""pallas_kernels.dispatch: which backend runs where, and every operation under every transformation of JAX."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from operations import KERNEL_MARK, ROWS, operations

from pallas_kernels import dispatch
from pallas_kernels.masked_topk import masked_topk
from pallas_kernels.sinkhorn import sinkhorn

OPERATIONS = operations()
EVERY = pytest.mark.parametrize("op", OPERATIONS.values(), ids=OPERATIONS.keys())
BF16 = 2.0**-7  # of the largest: where XLA sums in other orders, results that are rounded to bfloat16 differ by a step


def equal(got, want):
    """The same bits, dtypes and structure."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def program(fn, platform, *arrays):
    """The text of fn lowered for a platform that need not be here."""
    return jax.export.export(jax.jit(fn), platforms=[platform])(*arrays).mlir_module()


@functools.cache
def row_by_row(name):
    """The operation run on one row after another, jitted: what every transformation must equal."""
    op = OPERATIONS[name]
    run = jax.jit(op.door)
    results = [run(*op.row(i)) for i in range(ROWS)]
    return jax.tree.map(lambda *parts: np.stack(parts), *results)


# ---- which backend


@EVERY
def test_an_unknown_backend_is_refused_by_name(op):
    with pytest.raises(ValueError, match=f"has no backend 'triton'; it has .*{', '.join(sorted(op.backends))}"):
        op.door(*op.arrays, implementation="triton")
    with dispatch.default("triton"), pytest.raises(ValueError, match="has no backend 'triton'"):
        op.door(*op.arrays)


@EVERY
@pytest.mark.parametrize("platform", ["cpu", "tpu", "cuda"])
def test_each_platforms_program_holds_its_kernel(op, platform):
    served = [platform for name, platform in dispatch.PLATFORM.items() if name in op.backends]
    text = program(op.door, platform, *op.arrays)
    for owner, mark in KERNEL_MARK.items():
        assert (mark in text) == (owner == platform and platform in served)
    text = program(functools.partial(op.door, implementation="reference"), platform, *op.arrays)
    assert not any(mark in text for mark in KERNEL_MARK.values())


@EVERY
@pytest.mark.parametrize("backend", dispatch.PLATFORM)
def test_a_named_backend_runs_or_raises(op, backend):
    if backend not in op.backends:
        with pytest.raises(ValueError, match=f"{op.name} has no backend"):
            op.door(*op.arrays, implementation=backend)
        return
    platform = dispatch.PLATFORM[backend]
    named = functools.partial(op.door, implementation=backend)
    assert KERNEL_MARK[platform] in program(named, platform, *op.arrays)
    arrays, static = op.refused
    with pytest.raises(NotImplementedError, match=r"float16|None"):
        jax.eval_shape(functools.partial(named, **static), *arrays)


def test_the_default_is_what_operations_inside_run():
    scores = jnp.ones((4, 256))
    run = jax.jit(lambda s: masked_topk(s, k=3))
    want = run(scores)
    assert KERNEL_MARK["tpu"] in program(run, "tpu", scores)
    with dispatch.default("reference"):
        assert KERNEL_MARK["tpu"] not in program(run, "tpu", scores)
        equal(run(scores), want)
        with dispatch.default("mosaic_tpu"):
            assert KERNEL_MARK["tpu"] in program(run, "tpu", scores)
            with pytest.raises(ValueError, match="sinkhorn has no backend 'mosaic_tpu'; it has mosaic_gpu, reference"):
                sinkhorn(jnp.ones((1, 24)), streams=4, iterations=2, eps=1e-6)
            with pytest.raises(NotImplementedError, match="float16"):
                jax.eval_shape(run, scores.astype(jnp.float16))  # what was jitted outside sees the default too
        assert KERNEL_MARK["tpu"] not in program(run, "tpu", scores)
    assert KERNEL_MARK["tpu"] in program(run, "tpu", scores)
    with dispatch.default("mosaic_tpu"):  # a name in the call stands above it
        equal(masked_topk(scores, k=3, implementation="reference"), want)


def refusing(x, *, least):
    raise NotImplementedError(f"{x.shape[0]} rows; {least} are worth it")


def test_a_refusal_is_logged_once_with_its_reason(caplog):
    backends = {"reference": lambda x, least: x + least, "mosaic_tpu": refusing}

    def run(x):
        return dispatch.run("addition", backends, None, x, least=7)

    with caplog.at_level(logging.INFO, dispatch.__name__):
        equal(jax.jit(run)(jnp.arange(3)), jnp.arange(7, 10))
        assert not caplog.messages  # nothing refused on this platform
        for _ in range(2):
            assert "add" in program(run, "tpu", jnp.arange(3))
    assert caplog.messages == [
        "addition: the kernel for tpu refused, so the reference runs there: 3 rows; 7 are worth it"
    ]
    with pytest.raises(NotImplementedError, match="3 rows; 7 are worth it"):
        dispatch.run("addition", backends, "mosaic_tpu", jnp.arange(3), least=7)


@pytest.mark.parametrize("major,kernel", [(None, True), (8, False), (9, True), (10, False)])
def test_only_gpus_of_capability_9_get_kernels(major, kernel, monkeypatch):
    monkeypatch.setattr(dispatch, "cuda_major", lambda: major)
    text = program(lambda s: masked_topk(s, k=3), "cuda", jnp.ones((4, 256)))
    assert (KERNEL_MARK["cuda"] in text) == kernel


def test_a_program_for_two_platforms_holds_both():
    here = "cuda" if jax.default_backend() == "gpu" else "cpu"
    exported = jax.export.export(jax.jit(lambda s: masked_topk(s, k=3)), platforms=[here, "tpu"])(jnp.ones((4, 256)))
    assert KERNEL_MARK["tpu"] in exported.mlir_module()
    np.testing.assert_array_equal(exported.call(jnp.ones((4, 256))), [[0, 1, 2]] * 4)


# ---- transformations of JAX


def differentiable(op):
    """Which arrays are float, and the op's results summed with unequal weights, as a function of those."""
    floats = [i for i, a in enumerate(op.arrays) if not isinstance(a, tuple) and jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(floating, **how):
        arrays = list(op.arrays)
        for i, a in zip(floats, floating, strict=True):
            arrays[i] = a
        out = op.door(*arrays, **how).astype(jnp.float32)
        out = jnp.where(jnp.isfinite(out), out, 0)
        return (out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)).sum()

    return loss, [op.arrays[i] for i in floats]


@pytest.mark.parametrize("name", ["block_max", "index_scores", "pool_scores", "gather_attention", "expert_matmul",
                                  "sinkhorn"])  # fmt: skip
def test_the_gradient_is_that_of_the_reference(name):
    loss, floats = differentiable(OPERATIONS[name])
    got = jax.jit(jax.grad(loss))(floats)
    want = jax.jit(jax.grad(functools.partial(loss, implementation="reference")))(floats)
    if jax.default_backend() == "cpu":
        equal(got, want)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(*(np.asarray(x, np.float64) for x in (a, b)), rtol=0, atol=BF16 * jnp.abs(b).max())
    assert all(jnp.any(g != 0) for g in got)


def test_a_differentiated_program_holds_the_kernel():
    loss, floats = differentiable(OPERATIONS["sinkhorn"])
    assert KERNEL_MARK["cuda"] in program(jax.value_and_grad(loss), "cuda", floats)


@EVERY
def test_vmap_changes_no_bit(op):
    equal(jax.jit(jax.vmap(op.door, in_axes=op.axes))(*op.rows), row_by_row(op.name))


@EVERY
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_vmap_keeps_the_kernel(op, platform):
    if platform not in [dispatch.PLATFORM[b] for b in op.backends if b != "reference"]:
        pytest.skip(f"{op.name} has no kernel for {platform}")
    assert KERNEL_MARK[platform] in program(jax.vmap(op.door, in_axes=op.axes), platform, *op.rows)


@EVERY
def test_scan_changes_no_bit(op):
    def step(carry, mapped):
        mapped = iter(mapped)
        arrays = [next(mapped) if r else a for a, r in zip(op.rows, op.has_rows, strict=True)]
        return carry, op.door(*arrays)

    mapped = [a for a, r in zip(op.rows, op.has_rows, strict=True) if r]
    equal(jax.jit(lambda xs: lax.scan(step, 0, xs)[1])(mapped), row_by_row(op.name))


def test_vmap_inside_vmap():
    scores = np.random.default_rng(0).standard_normal((3, 4, 5, 64)).astype(np.float32)
    run = functools.partial(masked_topk, k=6)
    got = jax.jit(jax.vmap(jax.vmap(run, in_axes=1), in_axes=2))(scores)
    equal(got, jnp.transpose(run(jnp.asarray(scores)), (2, 1, 0, 3)))


@EVERY
def test_x64_changes_no_bit(op):
    want = jax.jit(op.door)(*op.arrays)
    with jax.enable_x64(True):
        equal(jax.jit(op.door)(*op.arrays), want)
        equal(op.door(*op.arrays), op.door(*op.arrays))
        for name in op.backends.keys() & dispatch.PLATFORM.keys():
            platform = dispatch.PLATFORM[name]
            assert KERNEL_MARK[platform] in program(op.door, platform, *op.arrays)


@EVERY
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_shards_change_no_bit(op, devices):
    mesh = Mesh(np.array(jax.devices()[:devices]), ("rows",))
    specs = tuple(P("rows") if r else P() for r in op.has_rows)
    got = jax.jit(dispatch.per_shard(op.door, mesh, specs, P("rows")))(*op.arrays)
    equal(got, jax.jit(op.door)(*op.arrays))


# ---- determinism


@EVERY
def test_a_reference_gives_the_same_bits_every_time(op):
    run = functools.partial(op.door, implementation="reference")
    want = jax.jit(run)(*op.arrays)
    equal(jax.jit(run)(*op.arrays), want)
    equal(jax.jit(lambda *a: run(*a))(*op.arrays), want)  # compiled again
    with jax.disable_jit():
        eager = run(*op.arrays)
        equal(run(*op.arrays), eager)
    if op.exact:
        equal(eager, want)
