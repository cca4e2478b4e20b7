"""The forward pass of training: whole packed rows through the functions inference runs, with gradients.

There is no cache before a row, so window rows and entries are those of the row itself. What inference reads rounded is
read rounded here, and the gradient goes straight through to the floats it was rounded from (`gather_attention`).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gather_attention import gather_attention
from v41jax import attention, compressor, drafts, indexer, mhc, model, moe, quant
from v41jax.cache import EntryPool
from v41jax.config import Config, LayerSpec, Role, layer_plan
from v41jax.indexer import Selection
from v41jax.layers import project
from v41jax.model import Flow, Params
from v41jax.quant import Packed
from v41jax.rope import layer_frequencies, rotate, turn
from v41jax.training import distill, lora, losses
from v41jax.training.distill import Lesson, Pupil
from v41jax.training.packing import Documents

Teacher = Literal["own", "group"]


class Source(NamedTuple):
    """What a KV source makes of a row: S entries and keys, packed, and the floats they were rounded from."""

    entries: Packed
    keys: Packed
    entry_BSH: jax.Array
    key_BSJ: jax.Array  # rounded, differentiable


class Taught(NamedTuple):
    """One layer's part in teaching: its attention, and at an index source its indexer."""

    lesson: Lesson
    pupil: Pupil | None


class Passed(NamedTuple):
    """What the layers made."""

    x_BTD: jax.Array  # input of the head
    kl_S: jax.Array  # f32 for each index source, summed over queries
    recall_S: jax.Array | None  # f32, mean over the queries that see more entries than they select; NaN without one
    balance: jax.Array  # f32, summed over tokens and layers
    load_LE: jax.Array  # f32, routes of each expert in each layer
    selections: tuple[Selection, ...]  # of the index sources
    hidden_BTM: jax.Array | None  # what draft stages read, `drafts.main_hidden` of every column


def run(
    params: Params,
    tokens_BT,
    documents: Documents,
    *,
    cfg: Config,
    dense: bool = False,
    teaches: bool = True,
    teacher: Teacher = "group",
    recall: bool = False,
    hidden: bool = False,
) -> Passed:
    """Runs every layer on every token.

    Args:
      params: from `qat.compute_weights`.
      tokens_BT: i32; what is in no document is ignored.
      documents: where the tokens stand.
      cfg: static.
      dense: attends to all visible entries, and the KL is over all of them; else over what the indexer selects.
      teaches: measures the KL; else it is 0.
      teacher: "own": a source learns from its own layer; "group": from all layers that use its selection.
      recall: measures it.
      hidden: gathers what draft stages read.
    """
    history = cfg.engram_max_ngram_size - 1 if cfg.engram_layer_ids else 0
    ngram_BN = jnp.full((tokens_BT.shape[0], history), -1, jnp.int32)
    flow, _ = model.embed(params, ngram_BN, tokens_BT, span=documents, cfg=cfg)
    source, group, ratio = None, [], 0
    kl, recalls, balance, load, selections, flows = [], [], jnp.float32(0), [], [], []

    def close():
        """Lets the layers since the last index source teach it."""
        pupil, lessons = group[0].pupil, [taught.lesson for taught in group]
        lessons = lessons if teacher == "group" else lessons[:1]
        window_BTW, seen = documents.window_BTW(cfg.sliding_window), distill.entry_range(documents, ratio)
        if not teaches:
            kl.append(jnp.float32(0))
        elif dense:
            kl.append(distill.dense_kl(pupil, lessons, window_BTW, source.entries, seen).sum())
        else:
            entry_BTK = flow.selection.entry_BTK
            kl.append(distill.sparse_kl(pupil, lessons, window_BTW, source.entries, entry_BTK).sum())
        if recall:
            shares, counts = distill.recall(lessons, window_BTW, source.entries, flow.selection.entry_BTK, seen)
            recalls.append(jnp.sum(jnp.where(counts, shares, 0)) / jnp.sum(counts, dtype=jnp.float32))
        selections.append(flow.selection)
        group.clear()

    for layer, weights in zip(layer_plan(cfg), params["layers"], strict=True):
        if group and layer.role is not Role.REUSE:
            close()
        step = functools.partial(_layer, layer=layer, cfg=cfg, dense=dense)
        flow, source, taught, (layer_balance, routes_E) = jax.checkpoint(step)(weights, flow, source, documents)
        if taught is not None:
            group.append(taught)
            ratio = layer.ratio
        balance += layer_balance
        load.append(routes_E)
        flows.append(flow)
    if group:
        close()
    x_BTD = model.leave(params, flow.streams_BTZD, flow.pre_BTZ, cfg=cfg)
    targets = [flows[target - 1] for target in cfg.dspark_target_layer_ids] if hidden else []
    return Passed(
        x_BTD=x_BTD,
        kl_S=jnp.stack(kl) if kl else jnp.zeros((0,), jnp.float32),
        recall_S=jnp.stack(recalls) if recalls else None,
        balance=balance,
        load_LE=jnp.stack(load),
        selections=tuple(selections),
        hidden_BTM=drafts.enter_targets(params, targets, cfg=cfg) if hidden else None,
    )


def _layer(weights, flow: Flow, source: Source | None, documents: Documents, *, layer: LayerSpec, cfg: Config, dense):
    """Runs one layer; returns the flow, the source in force, what it teaches, and `losses.balance`."""
    weights = lora.merge_layer(weights, flow.streams_BTZD.dtype)
    frequency = layer_frequencies(cfg, compressed=layer.ratio > 0)
    streams, x = model.enter(weights, flow, layer=layer, cfg=cfg)
    mix = mhc.mixes(weights, "attn", streams, cfg=cfg)
    if layer.role is Role.FULL:
        source = _compress(weights["attn"], x, documents, layer=layer, cfg=cfg)
    y, selection, taught = _attend(
        weights["attn"], x, source, flow.selection, documents, frequency=frequency, layer=layer, cfg=cfg, dense=dense
    )
    flow = Flow(mhc.expand(mix, y, streams), mix.pre, selection, flow.engram_rows)
    flow, routes, x = model.run_moe(weights, flow, top=cfg.num_experts_per_tok, cfg=cfg)
    logits = moe.router_logits(weights["ffn"]["gate"], x, cfg=cfg)
    return flow, source, taught, losses.balance(logits, routes.expert, documents.document_BT, cfg=cfg)


def _compress(weights, x_BTD, documents: Documents, *, layer: LayerSpec, cfg: Config) -> Source:
    """Makes the entries and index keys of a row. A group that is not of one document makes some too: none sees it."""
    nothing = jnp.zeros((x_BTD.shape[0], layer.ratio - 1, cfg.head_dim), jnp.float32)
    empty = Packed(nothing, nothing, None)
    pool = EntryPool(empty, empty, nothing, nothing, jnp.zeros((x_BTD.shape[0],), jnp.int32))
    latent, _, _ = compressor.compress(weights["compressor"], x_BTD, pool, span=documents, ratio=layer.ratio, cfg=cfg)
    frequency = layer_frequencies(cfg, compressed=True)
    position_BS = documents.position_BT[:, :: layer.ratio]
    rotation = turn(position_BS, frequency)
    detached = jax.lax.stop_gradient(latent)
    key = rotate(indexer.index_key(weights["indexer"], detached, cfg=cfg), position_BS, frequency)
    frozen = jax.lax.stop_gradient(weights["indexer"])  # a selection has no gradient
    return Source(
        entries=jax.lax.stop_gradient(quant.rotate_quantize(latent, rotation, cfg.formats.entry)),
        keys=indexer.index_keys(frozen, detached, position_BS, frequency=frequency, cfg=cfg),
        entry_BSH=rotate(latent, position_BS, frequency),
        key_BSJ=quant.fake_quantize(key, cfg.formats.index),
    )


def _attend(
    weights, x_BTD, source, selection, documents: Documents, *, frequency, layer: LayerSpec, cfg: Config, dense
):
    """Returns attention's output [B, T, D], the selection in force, and what the layer teaches."""
    stop = jax.lax.stop_gradient
    position_BT = documents.position_BT
    window_BTW = documents.window_BTW(cfg.sliding_window)
    latent = attention.query_latent(weights, x_BTD, cfg=cfg)
    query = attention.queries(weights, latent, position_BT, frequency=frequency, cfg=cfg)
    row = attention.window_latent(weights, x_BTD, cfg=cfg)
    window = stop(quant.rotate_quantize(row, turn(position_BT, frequency), cfg.formats.window))
    row = rotate(row, position_BT, frequency)

    pupil, taught, planes, chosen, entry, format = None, None, None, None, None, None
    if layer.role in (Role.FULL, Role.REINDEX):
        inputs = stop((x_BTD, latent))
        selection = indexer.select(
            stop(weights["indexer"]), *inputs, source.keys, selection, span=documents, layer=layer,
            frequency=frequency, cfg=cfg,
        )  # fmt: skip
        pupil = Pupil(
            *indexer.index_queries(weights["indexer"], *inputs, position_BT, frequency=frequency, cfg=cfg),
            source.key_BSJ,
        )
    if layer.role is not Role.WINDOW:
        taught = Taught(stop(Lesson(query, weights["attn_sink"], window)), pupil)
        planes, format = (source.entries.codes, source.entries.scales), source.entries.format
        chosen, entry = selection.entry_BTK, source.entry_BSH
    if dense and taught is not None:
        rows = _straight_through(row, window), _straight_through(source.entry_BSH, source.entries)
        seen = distill.entry_range(documents, layer.ratio)
        count_BT, slots = jnp.sum(window_BTW >= 0, axis=-1, dtype=jnp.int32), cfg.sliding_window
        out = distill.attend_all(query, weights["attn_sink"], rows[0], count_BT, rows[1], seen, slots=slots)
    else:
        out = gather_attention(
            query, weights["attn_sink"], (window.codes, window.scales), window_BTW, planes, chosen, (row, entry),
            scale=cfg.head_dim**-0.5, window_format=window.format, entry_format=format,
        )  # fmt: skip
    return attention.output(weights, out, position_BT, frequency=frequency, cfg=cfg), selection, taught


def _straight_through(floats, rounded: Packed):
    """What was rounded, whose gradient goes to the floats it was rounded from."""
    return quant.dequantize(rounded, floats.dtype) + (floats - jax.lax.stop_gradient(floats))


class Sums(NamedTuple):
    """Sums over tokens of one batch, of which losses are means."""

    loss: jax.Array  # f32, nats of the language model
    predicted: jax.Array  # f32, tokens that were predicted
    kl_S: jax.Array
    balance: jax.Array  # f32, mean over layers
    tokens: jax.Array  # f32, tokens there are
    load_LE: jax.Array

    def metrics(self) -> dict[str, jax.Array]:
        """The means: see `step.train_step`."""
        tokens, sources = jnp.maximum(self.tokens, 1), max(1, self.kl_S.size)
        return {
            "loss": self.loss / jnp.maximum(self.predicted, 1),
            "kl": jnp.sum(self.kl_S) / (tokens * jnp.float32(sources)),
            "balance": self.balance / tokens,
            "expert_load": self.load_LE.sum(0) / jnp.maximum(self.load_LE.sum(), 1),
        }


def train_forward(params: Params, batch: dict[str, Any], **options) -> Sums:
    """Runs a packed batch and sums its losses.

    Args:
      params: from `qat.compute_weights`.
      batch: {"tokens_BT", "document_BT"}, i32; laid out as `packing.align` does.
      options: of `run`.
    """
    documents = Documents(batch["document_BT"])
    predicted_BT = documents.predicted_BT
    passed = run(params, batch["tokens_BT"], documents, **options)
    loss = losses.language_model(passed.x_BTD, params["head"], batch["tokens_BT"], predicted_BT)
    return Sums(
        loss=loss,
        predicted=jnp.sum(predicted_BT, dtype=jnp.float32),
        kl_S=passed.kl_S,
        balance=passed.balance / passed.load_LE.shape[0],
        tokens=jnp.sum(documents.valid_BT, dtype=jnp.float32),
        load_LE=passed.load_LE,
    )


def logits(params: Params, batch: dict[str, Any], *, cfg: Config):
    """Computes f32 [B, T, V] of a packed batch, and the selections; for tests and small models."""
    passed = run(params, batch["tokens_BT"], Documents(batch["document_BT"]), cfg=cfg)
    return project(passed.x_BTD, params["head"], dtype=jnp.float32), passed.selections


def indexer_recall(params: Params, batch: dict[str, Any], *, cfg: Config):
    """Measures for each index source the share of the K heaviest entries' attention mass its selection holds.

    f32 [sources], `distill.recall` averaged over queries that see more entries than are selected; NaN without one.
    """
    return run(params, batch["tokens_BT"], Documents(batch["document_BT"]), cfg=cfg, recall=True).recall_S
