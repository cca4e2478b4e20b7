"""Gradients of the whole training forward pass against finite differences, everything in float64."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sessions import MICRO
from test_training_forward import packed, weights

from pallas_kernels import dispatch
from pallas_kernels.products import EXACT
from v41jax.training import forward

pytestmark = pytest.mark.usefixtures("quick_compilation")

STEP = 1e-7  # moves no selection and no route; Engram's root at 1e-6 bends within larger ones
FINITE = 5e-5  # relative, of a central difference: what cubic terms leave
FLOOR = 1e-6  # absolute: losses near 10, sums of 1e4 terms, are rounded by 1e-13 and divided by STEP

SMALL = dataclasses.replace(
    MICRO,
    num_hidden_layers=4,
    compress_ratios=(0, 2, 1, 1),
    kv_source_layer_ids=(1, 2),
    index_source_layer_ids=(1, 2, 3),
)


def test_gradients_of_every_parameter(monkeypatch):
    cfg = SMALL
    batch, start = packed(cfg, lengths=((13, 6), (3, 16)), columns=24), weights(cfg)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"), dispatch.default("reference"):
        monkeypatch.setattr(jnp, "float32", jnp.float64)  # what the code does in float32 it does in float64 here
        monkeypatch.setitem(EXACT, "preferred_element_type", jnp.float64)
        flat, structure = jax.tree_util.tree_flatten_with_path(start)
        names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in flat]
        rng = np.random.default_rng(0)
        values = []
        for name, (_, leaf) in zip(names, flat, strict=True):
            value = np.asarray(leaf)
            if value.dtype == np.float32:
                value = value.astype(np.float64)
                if ".bias" not in name:  # norms, sinks and bases away from their neutral values
                    value = value + 0.1 * rng.normal(size=value.shape)
            values.append(jnp.asarray(value))

        def losses(values):
            sums = forward.train_forward(jax.tree.unflatten(structure, values), batch, cfg=cfg, dense=False)
            return jnp.stack([sums.loss + sums.balance, sums.kl_S.sum()]) / 40

        floats = [i for i, v in enumerate(values) if v.dtype == jnp.float64 and v.size]
        both = jax.jit(losses)

        def total(some):
            full = list(values)
            for i, value in zip(floats, some, strict=True):
                full[i] = value
            return losses(full).sum()

        # One gradient of both: neither loss reaches a parameter of the other, and the teacher counts as constant.
        gradient = jax.jit(jax.grad(total))([values[i] for i in floats])
        checked, wrong = 0, []
        for number, i in enumerate(floats):
            if ".gate.bias" in names[i]:
                continue
            part = int(".attn.indexer." in names[i])
            direction = rng.normal(size=values[i].shape)
            moved = [list(values), list(values)]
            for sign, full in zip((1, -1), moved, strict=True):
                full[i] = values[i] + sign * STEP * direction
            up, down = (np.asarray(both(full))[part] for full in moved)
            want, got = (up - down) / (2 * STEP), float(np.vdot(gradient[number], direction))
            if abs(got - want) > FINITE * abs(want) + FLOOR or got == 0:
                wrong.append((names[i], got, want))
            checked += 1
        assert not wrong
        assert checked > 80
    jax.clear_caches()
