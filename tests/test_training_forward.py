"""The forward pass of training: packed equals alone and inference, and which loss reaches which parameter."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxprs import result_shapes
from sessions import MICRO, run, spread

from pallas_kernels import blocks, dispatch
from v41jax import config, init_cache, model, quant, tree
from v41jax.training import export, forward, packing, qat, step

pytestmark = pytest.mark.usefixtures("quick_compilation")

PACKED = 2e-5  # of the logits' deviation: float32 sums in another order, through five layers
QUANTIZED = dataclasses.replace(  # Full, Reindex, Reuse
    MICRO,
    num_hidden_layers=3,
    compress_ratios=(2, 2, 2),
    kv_source_layer_ids=(0,),
    index_source_layer_ids=(0, 1),
    candidate_source_layer_id=0,
    formats=config.Formats(),
)
MANY_BLOCKS = dataclasses.replace(MICRO, index_topk=2, candidate_topk_blocks=2)
LENGTHS = ((23, 5, 1, 30), (40, 2, 3, 3))


@functools.cache
def master(cfg=MICRO):
    return export.to_master(model.init_params(cfg, jax.random.key(0)))


def packed(cfg=MICRO, lengths=LENGTHS, columns=88, seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, cfg.vocab_size, (len(lengths), columns)).astype(np.int32)
    document = np.full(tokens.shape, -1, np.int32)
    for row, sizes in zip(document, lengths, strict=True):
        row[: sum(sizes)] = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    return packing.align({"tokens_BT": tokens, "document_BT": document}, cfg=cfg)


@functools.cache
def weights(cfg, rounded=False):
    return jax.jit(lambda p: qat.compute_weights(p, cfg=cfg, dtype=jnp.float32, weights=rounded))(master(cfg))


@functools.cache
def run_packed(few):
    """A compiled `forward.logits` of MANY_BLOCKS; `few` replaces FEW_BLOCKS in it, None does not."""
    with pytest.MonkeyPatch.context() as patch:
        if few is not None:
            patch.setattr("v41jax.indexer.FEW_BLOCKS", few)
        run = jax.jit(lambda w, batch: forward.logits(w, batch, cfg=MANY_BLOCKS))
        return run.lower(weights(MANY_BLOCKS), packed(MANY_BLOCKS)).compile()


def alone(batch, columns=40):
    """Every document as a row of its own, and where its tokens were."""
    rows, where = [], []
    for b, document in enumerate(batch["document_BT"]):
        for number in np.unique(document[document >= 0]):
            at = np.flatnonzero(document == number)
            rows.append(np.pad(batch["tokens_BT"][b, at], (0, columns - len(at))))
            where.append((b, at))
    return np.stack(rows), where


@functools.cache
def inference():
    """Logits and selections of every document of `packed`, each a row of its own, and where its tokens were."""
    tokens, where = alone(packed(MANY_BLOCKS))
    lengths = jnp.array([len(at) for _, at in where], jnp.int32)
    cache = init_cache(MANY_BLOCKS, *tokens.shape)
    want, _, records = run(weights(MANY_BLOCKS), cache, tokens, lengths, cfg=MANY_BLOCKS, mode="full", read="all")
    return want, [record.flow.selection for record in records], where


@pytest.mark.parametrize("few", [None, 0], ids=["every entry", "blocks first"])
def test_packed_documents_are_as_alone_in_inference(few):
    cfg = MANY_BLOCKS
    logits, selections = run_packed(few)(weights(cfg), packed(cfg))
    want, all_theirs, where = inference()
    sources = [(all_theirs[layer], cfg.compress_ratios[layer]) for layer in cfg.index_source_layer_ids]
    for row, (b, at) in enumerate(where):
        assert spread(logits[b, at], want[row, : len(at)]) < PACKED
        for got, (selection, ratio) in zip(selections, sources, strict=True):
            for name, unit in (("entry_BTK", ratio), ("block_BTC", ratio * cfg.candidate_block_size)):
                theirs = getattr(selection, name)
                if theirs is None:
                    assert getattr(got, name) is None
                    continue
                mine, theirs = np.asarray(getattr(got, name))[b, at], np.asarray(theirs)[row, : len(at)]
                mine = np.where(mine < 0, -1, mine - at[0] // unit)
                np.testing.assert_array_equal(mine, theirs)


def test_another_document_changes_nothing():
    batch, w = packed(MANY_BLOCKS), weights(MANY_BLOCKS)
    first, _ = run_packed(None)(w, batch)
    middle = batch["document_BT"][0] == 1
    other = {**batch, "tokens_BT": batch["tokens_BT"].copy()}
    other["tokens_BT"][0, middle] += 1
    other["tokens_BT"][batch["document_BT"] < 0] += 3  # nor does what is in no document
    other["tokens_BT"] %= MANY_BLOCKS.vocab_size
    second, _ = run_packed(None)(w, other)
    kept = batch["document_BT"] >= 0
    kept[0, middle] = False
    assert np.array_equal(np.asarray(first)[kept], np.asarray(second)[kept])
    assert not np.array_equal(np.asarray(first)[0, middle], np.asarray(second)[0, middle])


@functools.partial(jax.jit, static_argnames=("cfg", "options"))
def total_gradients(params, batch, kl_weight, balance_weight, *, cfg, options):
    """`step.total_gradients`, one program for all weights of the losses."""
    options = dataclasses.replace(options, kl_weight=kl_weight, balance_weight=balance_weight)
    return step.total_gradients(params, batch, cfg=cfg, options=options)


def gradients(*, batch=None, kl=0.0, balance=0.0, **options):
    """Gradients of QUANTIZED by parameter, and the sums."""
    cfg, options = QUANTIZED, step.Options(**options)
    batch = packed(cfg) if batch is None else batch
    grads, sums = total_gradients(master(cfg), batch, jnp.float32(kl), jnp.float32(balance), cfg=cfg, options=options)
    names = [name for name, _ in tree.walk(model.specs(cfg))]
    return dict(zip(names, map(np.asarray, jax.tree.leaves(grads)), strict=True)), sums


def test_each_loss_reaches_its_own_parameters_to_the_bit():
    plain, _ = gradients()
    both, _ = gradients(kl=1.0)
    warm, _ = gradients(kl=1.0, stage="warmup")
    for name, gradient in both.items():
        if ".attn.indexer." in name:
            assert not plain[name].any(), f"the language model trains {name}"
            assert np.abs(gradient).max() > 0 and np.abs(warm[name]).max() > 0, name
        else:
            np.testing.assert_array_equal(gradient, plain[name], err_msg=f"the KL trains {name}")
            assert not warm[name].any(), name
            if "token_map" not in name and ".gate.bias" not in name:
                assert np.abs(gradient).max() > 0, f"{name} has no gradient"


def test_rows_without_documents_have_no_gradient():
    batch = packed(QUANTIZED)
    batch["document_BT"][:] = -1
    got, sums = gradients(batch=batch, kl=1.0, balance=1.0)
    assert sums.loss == 0 and sums.balance == 0 and not np.any(sums.kl_S)
    assert all(not g.any() for g in got.values())  # NaN would count


def test_bfloat16_computes_in_bfloat16_and_accumulates_master_gradients_in_float32():
    got, sums = gradients(dtype="bfloat16", kl=1.0)
    exact, exact_sums = gradients(kl=1.0)
    assert all(g.dtype == np.float32 for name, g in got.items() if name != "token_map")
    np.testing.assert_allclose(sums.loss, exact_sums.loss, rtol=2e-2)  # 8 bits, through three layers
    assert any(not np.array_equal(g, exact[name]) for name, g in got.items())


@pytest.mark.parametrize("cotangent", [1000.0, 1e-4])
@pytest.mark.parametrize("format", ["fp8_e8m0_32", "fp4_e4m3_16", "fp4_e8m0_32", "fp8_e8m0_32x32"])
def test_rounding_passes_cotangents_unchanged_in_scan_and_remat(cotangent, format):
    x = jax.random.normal(jax.random.key(0), (32, 32))

    def f(x):
        body = jax.checkpoint(lambda c, _: (quant.fake_quantize(c, format), None))
        return jnp.sum(jax.lax.scan(body, x, None, length=3)[0] * jnp.float32(cotangent))

    assert np.array_equal(jax.jit(jax.grad(f))(x), np.full(x.shape, cotangent, np.float32))


def test_qat_rounds_exactly_what_a_checkpoint_stores():
    cfg = dataclasses.replace(QUANTIZED, quantized=True)
    w = weights(cfg, rounded=True)
    stored = jax.jit(lambda p: export.to_release(p, cfg=cfg, dtype=jnp.float32))(master(cfg))
    rounded = 0
    for path, spec in tree.walk(model.specs(cfg)):
        a, b = w, stored
        for part in path.split("."):
            key = int(part) if part.isdigit() else part
            a, b = a[key], b[key]
        a = a.codes if isinstance(a, quant.Packed) else a
        rounded += spec.format is not None
        np.testing.assert_array_equal(a, quant.dequantize(b, jnp.float32) if spec.format else b, err_msg=path)
    assert rounded > 30


def test_nothing_is_quadratic_in_the_sparse_stage():
    cfg, T = dataclasses.replace(MICRO, candidate_block_size=8), 32768
    batch = {"tokens_BT": jax.ShapeDtypeStruct((1, T), "int32"), "document_BT": jax.ShapeDtypeStruct((1, T), "int32")}
    params = jax.eval_shape(lambda: master(cfg))
    options = step.Options()
    with dispatch.default("reference"):
        shapes = result_shapes(lambda p, b: step.total_gradients(p, b, cfg=cfg, options=options), params, batch)
    largest = max(shapes, key=lambda s: int(np.prod(s)))
    assert np.prod(largest) <= blocks.BLOCK_BYTES // 4 < T * T // 8, largest
    assert not [s for s in shapes if sum(n >= T // 2 for n in s) > 1]
