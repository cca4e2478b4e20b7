"""The training step: accumulation, devices, stages, the routers' bias, and thirty steps that learn."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sessions import MICRO
from test_training_forward import master, packed

from v41jax import config
from v41jax.training import packing, step
from v41jax.training.optimizer import make_optimizer
from v41jax.training.settings import Stage

pytestmark = pytest.mark.usefixtures("quick_compilation")

ORDER = 1e-4  # of a gradient's largest value: float32 sums of other sizes, in another order
SMALL = dataclasses.replace(
    MICRO,
    num_hidden_layers=2,
    compress_ratios=(0, 2),
    kv_source_layer_ids=(1,),
    index_source_layer_ids=(1,),
    candidate_source_layer_id=1,
    formats=config.Formats(),
)
EXACT = dataclasses.replace(SMALL, formats=config.UNQUANTIZED)  # no rounding that a last bit could flip
LENGTHS = ((13, 6), (3, 1, 4), (24,), (2,), (9, 9), (20,), (5, 1, 1), (1,))  # very different counts of tokens


@functools.partial(jax.jit, static_argnames=("cfg", "options"))
def gradients(params, batch, *, cfg, options):
    return step.total_gradients(params, batch, cfg=cfg, options=options)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=ORDER * max(1e-3, float(np.abs(b).max(initial=0))))


@functools.cache
def whole():
    batch = packed(EXACT, lengths=LENGTHS, columns=32)
    return batch, gradients(master(EXACT), batch, cfg=EXACT, options=step.Options())


def test_micro_batches_are_one_batch():
    batch, want = whole()
    assert_close(gradients(master(EXACT), batch, cfg=EXACT, options=step.Options(micro_batches=4)), want)


def test_eight_devices_are_one():
    batch, want = whole()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
    params = jax.device_put(master(EXACT), NamedSharding(mesh, PartitionSpec()))
    assert_close(gradients(params, batch, cfg=EXACT, options=step.Options()), want)


def test_thirty_steps_learn():
    stage = Stage(steps=30, learning_rate=3e-3)
    batch = packed(SMALL, lengths=((30, 20), (40, 9)), columns=64)
    optimizer = make_optimizer(stage, master(SMALL), cfg=SMALL, weight_decay=0.1)
    state = step.init_state(jax.tree.map(jnp.copy, master(SMALL)), optimizer)
    history = []
    for _ in range(stage.steps):
        state, metrics = step.train_step(state, batch, cfg=SMALL, optimizer=optimizer, options=step.Options())
        history.append({name: np.asarray(value) for name, value in metrics.items()})
    assert int(state.step) == 30
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]  # the batch is learnt by heart
    np.testing.assert_allclose(history[0]["expert_load"].sum(), 1, rtol=ORDER)
    moved = np.asarray(state.params["layers"][0]["ffn"]["gate"]["bias"])
    assert moved.any() and np.abs(moved).max() <= 30 * step.Options().bias_step + ORDER


def test_dense_attention_is_the_sparse_one_where_everything_is_selected():
    short = ((8, 6), (3, 1, 4), (8,), (2,), (7, 7), (8, 8), (5, 1, 1), (1,))  # up to 4 entries in a document
    assert EXACT.index_topk == 4
    batch = packed(EXACT, lengths=short, columns=32)
    want, _ = gradients(master(EXACT), batch, cfg=EXACT, options=step.Options())
    got, sums = gradients(master(EXACT), batch, cfg=EXACT, options=step.Options(stage="dense"))
    assert not sums.kl_S.any()
    train = step.trainable(master(EXACT), stage="dense")
    kept = [jax.tree.map(lambda on, g: g if on else None, train, g) for g in (got, want)]
    assert len(jax.tree.leaves(kept[0])) > 30
    assert_close(*kept)
    assert not any(np.asarray(g).any() for on, g in zip(*map(jax.tree.leaves, (train, got)), strict=True) if not on)


def test_bias_moves_toward_balance():
    params = {"layers": [{"ffn": {"gate": {"bias": jnp.zeros(3), "weight": jnp.ones(3)}}}]}
    moved = step.balance_bias(params, jnp.array([[4.0, 1.0, 2.5]]), step=0.001)
    np.testing.assert_array_equal(moved["layers"][0]["ffn"]["gate"]["bias"], np.float32([-0.001, 0.001, 0]))


def test_warmup_trains_indexers_only():
    train = step.trainable(master(SMALL), stage="warmup")
    names = [jax.tree_util.keystr(p, simple=True, separator=".") for p, on in jax.tree.leaves_with_path(train) if on]
    assert names and all(".attn.indexer." in name for name in names)
    train = step.trainable(master(SMALL), stage="dense")
    names = [jax.tree_util.keystr(p, simple=True, separator=".") for p, on in jax.tree.leaves_with_path(train) if on]
    assert names and not any(".attn.indexer." in name for name in names)
    train = step.trainable(master(SMALL), stage="sparse")
    off = [jax.tree_util.keystr(p, simple=True, separator=".") for p, on in jax.tree.leaves_with_path(train) if not on]
    assert all(name == "token_map" or name.endswith("gate.bias") for name in off)


def test_bad_batches_are_refused():
    batch = packed(SMALL, lengths=LENGTHS[:3], columns=32)
    state = step.init_state({}, optax.identity())
    run = functools.partial(step.train_step, cfg=SMALL, optimizer=optax.identity())
    with pytest.raises(ValueError, match="3 rows cannot be split into micro_batches=2"):
        run(state, batch, options=step.Options(micro_batches=2))
    batch["document_BT"][0, :4] = [1, 0, 1, 0]
    with pytest.raises(ValueError, match="numbers must ascend"):
        run(state, batch, options=step.Options())
    odd = {name: jnp.zeros((2, 30), jnp.int32) for name in batch}
    with pytest.raises(ValueError, match="30 columns are not whole multiples of 8"):
        run(state, odd, options=step.Options())


@pytest.mark.parametrize("lengths", [((32,),), ((5, 3, 8),), ((1,) * 30,), ((), (7, 2))])
def test_align_keeps_every_document(lengths):
    columns = 32
    before = {"tokens_BT": np.arange(len(lengths) * columns, dtype=np.int32).reshape(-1, columns)}
    before["document_BT"] = np.full((len(lengths), columns), -1, np.int32)
    for row, sizes in zip(before["document_BT"], lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    after = packing.align(before, cfg=SMALL)
    size = packing.multiple(SMALL)
    assert after["tokens_BT"].shape[1] % size == 0
    assert packing.align(after, cfg=SMALL) is after
    for b, sizes in enumerate(lengths):
        for number in range(len(sizes)):
            old, new = (batch["document_BT"][b] == number for batch in (before, after))
            assert np.flatnonzero(new)[0] % size == 0
            np.testing.assert_array_equal(before["tokens_BT"][b, old], after["tokens_BT"][b, new])
