"""The model: its weights, one block, and the pass over a stack of blocks (architecture section 2, prefill.md).

`run` is a pure function of parameters, cache and tokens; `inference.py` checks input and jits it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from v41jax import attention, compressor, engram, indexer, mhc, moe, quant, tree
from v41jax.cache import Cache, EntryPool, Span, append_entries, take_rows
from v41jax.config import Config, LayerSpec, Role, layer_plan
from v41jax.indexer import Selection
from v41jax.layers import project, rms_norm
from v41jax.moe import Routes
from v41jax.quant import Packed
from v41jax.rope import layer_frequencies, turn
from v41jax.tree import ArraySpec, Specs

Params = dict  # the nesting of `specs`, arrays and Packed at the leaves


# ---- weights


def specs(cfg: Config) -> Specs:
    """Describes every weight of the model, nested so that a leaf's path is its name in a checkpoint."""
    vocabulary = ArraySpec(shape=(cfg.vocab_size, cfg.hidden_size), axes=("vocab", "embed"), init="unit")
    out = {
        "embed": vocabulary,
        "head": ArraySpec(shape=vocabulary.shape, axes=vocabulary.axes),
        "norm": _norm(cfg),
        "layers": [_layer_specs(cfg, layer) for layer in layer_plan(cfg)],
        "mtp": [_draft_specs(cfg, stage) for stage in range(cfg.num_nextn_predict_layers)],
    }
    return {**out, "token_map": engram.token_map_spec(cfg)} if cfg.engram_layer_ids else out


def _norm(cfg: Config) -> ArraySpec:
    return ArraySpec(shape=(cfg.hidden_size,), axes=("embed",), init="ones")


def _block_specs(cfg: Config, experts: int) -> Specs:
    return {
        "attn_norm": _norm(cfg),
        "ffn_norm": _norm(cfg),
        **mhc.specs(cfg, "attn"),
        **mhc.specs(cfg, "ffn"),
        "attn": attention.specs(cfg),
        "ffn": moe.specs(cfg, experts),
    }


def _layer_specs(cfg: Config, layer: LayerSpec) -> Specs:
    out = _block_specs(cfg, cfg.n_routed_experts)
    if layer.role is Role.FULL:
        out["attn"]["compressor"] = compressor.specs(cfg, layer)
    if layer.role in (Role.FULL, Role.REINDEX):
        out["attn"]["indexer"] = indexer.specs(cfg, layer)
    if layer.engram is not None:
        out["engram"] = engram.specs(cfg, layer.engram)
    return out


def _draft_specs(cfg: Config, stage: int) -> Specs:
    """Describes one DSpark stage (section 9)."""
    D, V, R = cfg.hidden_size, cfg.vocab_size, cfg.dspark_markov_rank
    out = _block_specs(cfg, cfg.dspark_n_routed_experts)
    if stage == 0:
        targets = len(cfg.dspark_target_layer_ids) * D
        out["main_proj"] = ArraySpec(shape=(D, targets), axes=("embed", None), format=cfg.dense_format)
        out["main_norm"] = _norm(cfg)
    if stage == cfg.num_nextn_predict_layers - 1:
        vocabulary = ArraySpec(shape=(V, R), axes=("vocab", None))
        out["norm"] = _norm(cfg)
        out["markov_head"] = {"embed": vocabulary, "head": vocabulary}
        out["confidence_head"] = {"proj": ArraySpec(shape=(1, D + R), axes=(None, None))}
    return out


def init_params(cfg: Config, key: jax.Array, *, dtype=jnp.float32) -> Params:
    """Draws random parameters; what the config stores in FP8 and FP4 is packed."""
    return tree.initialize(specs(cfg), key, dtype)


def parameter_count(cfg: Config) -> dict[str, int]:
    """Counts released weights by class: {"backbone", "engram", "drafts"}; scales are not counted."""
    counts = {"backbone": 0, "engram": 0, "drafts": 0}
    for path, spec in tree.walk(specs(cfg)):
        kind = "drafts" if path.startswith("mtp.") else "engram" if path.endswith("engram.embed") else "backbone"
        counts[kind] += tree.parameter_count({path: spec})
    return counts


# ---- one pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Flow:
    """What passes from layer to layer, token by token."""

    streams_BTZD: jax.Array
    pre_BTZ: jax.Array  # f32, collapses the streams for the sublayer that comes next
    selection: Selection | None  # in force since the last index source
    engram_rows: tuple[jax.Array, ...]  # i32 [B, T, rows] for each engram layer


class LayerRecord(NamedTuple):
    """What a layer chose and made, for tests and pictures; unused it costs nothing under jit."""

    span: Span  # the tokens that went through its attention; the rest covers them
    flow: Flow
    routes: Routes


def run(params: Params, cache: Cache, tokens_BT, lengths_B, *, cfg: Config, mode: str, read: str = "last"):
    """Runs the model on one call's tokens.

    Args:
      params, cache: see `inference.prefill`.
      tokens_BT: i32; a row's tokens stand left, padding behind them is ignored.
      lengths_B: i32, tokens of each row, 0 allowed.
      cfg: static.
      mode: static; which tokens enter the decoder layers: a Mode, or "encoder" for none.
      read: static; "last" for logits f32 [B, V] of each row's last token, "all" for [B, T, V].
    Returns:
      logits, the next cache, and one LayerRecord a layer. Logits are None in mode "encoder". They are NaN in rows that
      have no token, overflow the cache, or lack the decoder windows an earlier `prefill_encoder` owes.
    """
    span = Span(cache.length_B, lengths_B, tokens_BT.shape[1])
    end_B = span.end_B
    flow, ngram_BN = embed(params, cache.ngram_BN, tokens_BT, span=span, cfg=cfg)
    windows, pools, records = list(cache.windows), list(cache.pools), []
    for layer, weights in zip(layer_plan(cfg), params["layers"], strict=True):
        keeps, first_B = span.width, jnp.zeros_like(end_B)
        if layer.decoder and mode == "exact":
            keeps = (cfg.num_hidden_layers - layer.layer) * (cfg.sliding_window - 1) + 1
        elif layer.decoder and mode == "replay":
            keeps, first_B = cfg.sliding_window, end_B - cfg.sliding_window
        window, pool = windows[layer.layer], None if layer.pool is None else pools[layer.pool]
        if layer.decoder and mode == "encoder":
            if layer.role is Role.FULL and layer.pool is not None:
                pools[layer.pool] = append(weights, flow, pool, span=span, layer=layer, cfg=cfg)
            break
        record, window, pool = run_layer(
            weights, flow, window, pool, span=span, held_B=cache.length_B, first_B=first_B, keeps=keeps, layer=layer,
            cfg=cfg,
        )  # fmt: skip
        windows[layer.layer] = window
        if layer.pool is not None:
            pools[layer.pool] = pool
        span, flow, _ = record
        records.append(record)

    owed_B = jnp.maximum(cache.owed_B - lengths_B, 0)
    if mode == "encoder":
        owed_B = jnp.where(lengths_B > 0, cfg.decoder_tail, cache.owed_B)
    cache = Cache(tuple(windows), tuple(pools), ngram_BN, end_B, owed_B, cache.capacity)
    if mode == "encoder":
        return None, cache, records
    logits = _logits(params, flow, span, read=read, cfg=cfg)
    fine_B = (lengths_B > 0) & (end_B <= cache.capacity) & (owed_B == 0)
    return jnp.where(fine_B.reshape(-1, *[1] * (logits.ndim - 1)), logits, jnp.nan), cache, records


def embed(params, ngram_BN, tokens_BT, *, span: Span, cfg: Config):
    """Looks up the call's tokens, copies them to every stream, and hashes their n-grams.

    Returns the Flow into layer 0 and the n-gram history after the call.
    """
    tokens_BT = jnp.where(span.valid_BT, tokens_BT, 0)
    streams, pre = look_up(params, tokens_BT, cfg=cfg)
    rows = ()
    if cfg.engram_layer_ids:
        ids, pad = params["token_map"][tokens_BT], params["token_map"][cfg.engram_pad_token_id]
        tables = range(len(cfg.engram_layer_ids))
        reach = span.reach_BT
        rows = tuple(engram.hash_rows(ngram_BN, ids, pad, table=t, cfg=cfg, reach_BT=reach) for t in tables)
        ngram_BN = engram.remember(ngram_BN, ids, span.length_B)
    return Flow(streams, pre, None, rows), ngram_BN


def look_up(params, tokens_BT, *, cfg: Config):
    """Looks up tokens; returns streams [B, T, Z, D], all alike, and the f32 mix [B, T, Z] that takes the first."""
    streams = jnp.repeat(params["embed"][tokens_BT][:, :, None], cfg.hc_mult, axis=2)
    return streams, jnp.zeros((*tokens_BT.shape, cfg.hc_mult), jnp.float32).at[..., 0].set(1)


def run_layer(weights, flow: Flow, window: Packed, pool, *, span: Span, held_B, first_B, keeps: int, layer, cfg):
    """Runs one layer on each row's last `keeps` tokens of the call; a Full layer first makes entries of all of them.

    Args:
      weights: of the layer.
      flow: into the layer.
      window: its ring, Packed [B, W, H].
      pool: the EntryPool it reads, or None in a window-only layer.
      span: the call's tokens in `flow`.
      held_B, first_B: see `cache.window_index`.
      layer: its LayerSpec.
    Returns:
      a LayerRecord with the flow out of the layer, the ring, the pool.
    """
    span, flow, window, pool = run_attention(
        weights, flow, window, pool, span=span, held_B=held_B, first_B=first_B, keeps=keeps, layer=layer, cfg=cfg
    )
    flow, routes, _ = run_moe(weights, flow, top=cfg.num_experts_per_tok, cfg=cfg)
    return LayerRecord(span, flow, routes), window, pool


def run_moe(weights, flow: Flow, *, top: int, cfg: Config):
    """Runs the MoE half of a layer, `top` experts a token; returns the flow, the Routes, and the router's input."""
    streams = flow.streams_BTZD
    mix = mhc.mixes(weights, "ffn", streams, cfg=cfg)
    with jax.named_scope("moe"):
        x = rms_norm(mhc.collapse(flow.pre_BTZ, streams), weights["ffn_norm"], cfg.rms_norm_eps)
        y, routes = moe.moe(weights["ffn"], x, top=top, cfg=cfg)
    return dataclasses.replace(flow, streams_BTZD=mhc.expand(mix, y, streams), pre_BTZ=mix.pre), routes, x


def run_attention(weights, flow: Flow, window: Packed, pool, *, span: Span, held_B, first_B, keeps: int, layer, cfg):
    """Runs the attention half of a layer; see `run_layer`.

    Returns the span of the tokens it kept, the flow into the MoE half, the ring and the pool.
    """
    frequency = layer_frequencies(cfg, compressed=layer.ratio > 0)
    if layer.role is Role.FULL:
        pool = append(weights, flow, pool, span=span, layer=layer, cfg=cfg)
    span, crop = span.last(keeps)
    flow = crop(flow)
    streams, x = enter(weights, flow, layer=layer, cfg=cfg)

    mix = mhc.mixes(weights, "attn", streams, cfg=cfg)
    with jax.named_scope(f"attention_{layer.role.value}"):
        latent = attention.query_latent(weights["attn"], x, cfg=cfg)
        selection = flow.selection
        if layer.role in (Role.FULL, Role.REINDEX):
            selection = indexer.select(
                weights["attn"]["indexer"], x, latent, pool.keys, selection, span=span, layer=layer,
                frequency=frequency, cfg=cfg,
            )  # fmt: skip
        entries, chosen = None, None
        if layer.role is not Role.WINDOW:
            assert selection is not None  # a KV source is an index source, and comes first
            entries, chosen = pool.entries, selection.entry_BTK
        y, window = attention.attend(
            weights["attn"], x, latent, window, entries, chosen, span=span, held_B=held_B, first_B=first_B,
            frequency=frequency, cfg=cfg,
        )  # fmt: skip
    streams = mhc.expand(mix, y, streams)
    return span, Flow(streams, mix.pre, selection, flow.engram_rows), window, pool


def enter(weights, flow: Flow, *, layer: LayerSpec, cfg: Config):
    """Adds the layer's n-gram memory; returns streams and, collapsed and normalised, attention's input [B, T, D]."""
    streams = flow.streams_BTZD
    if layer.engram is not None:
        with jax.named_scope("engram"):
            streams = engram.engram(weights["engram"], streams, flow.engram_rows[layer.engram], cfg=cfg)
    return streams, rms_norm(mhc.collapse(flow.pre_BTZ, streams), weights["attn_norm"], cfg.rms_norm_eps)


def append(weights, flow: Flow, pool, *, span: Span, layer: LayerSpec, cfg: Config) -> EntryPool:
    """Compresses the call's tokens at a KV source and appends the entries and index keys of completed groups."""
    _, x = enter(weights, flow, layer=layer, cfg=cfg)
    weights = weights["attn"]
    with jax.named_scope("compress"):
        latent, count_B, pool = compressor.compress(
            weights["compressor"], x, pool, span=span, ratio=layer.ratio, cfg=cfg
        )
        frequency = layer_frequencies(cfg, compressed=True)
        first_B = span.start_B // layer.ratio
        entry_BG = first_B[:, None] + jnp.arange(latent.shape[1], dtype=jnp.int32)
        position_BG = entry_BG * layer.ratio  # an entry stands at the first token of its group
        entries = quant.rotate_quantize(latent, turn(position_BG, frequency), cfg.formats.entry)
        keys = indexer.index_keys(weights["indexer"], latent, position_BG, frequency=frequency, cfg=cfg)
        return append_entries(pool, entries, keys, first_B, count_B)


def leave(params, streams_BTZD, pre_BTZ, *, cfg: Config):
    """Collapses the streams that leave the last layer to the input of the head [B, T, D]."""
    return rms_norm(mhc.collapse(pre_BTZ, streams_BTZD), params["norm"], cfg.rms_norm_eps)


def _logits(params, flow: Flow, span: Span, *, read: str, cfg: Config):
    streams, pre = flow.streams_BTZD, flow.pre_BTZ
    if read == "last":
        last_B1 = jnp.maximum(span.length_B - 1, 0)[:, None]
        streams, pre = take_rows((streams, pre), last_B1)
    logits = project(leave(params, streams, pre, cfg=cfg), params["head"], dtype=jnp.float32)
    return logits[:, 0] if read == "last" else logits
