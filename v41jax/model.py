"""The model: its weights, one block, and the pass over a stack of blocks (architecture section 2, prefill.md).

`run` is a pure function of parameters, cache and tokens; `inference.py` checks input and jits it.
"""

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
from v41jax.rope import layer_frequencies, rotate
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


class LayerRecord(NamedTuple):
    """What a layer chose and made, for tests and pictures; unused fields cost nothing under jit.

    Fields cover the `span` of tokens that entered the layer's attention.
    """

    span: Span
    selection: Selection | None
    routes: Routes
    streams_BTZD: jax.Array
    pre_BTZ: jax.Array
    engram_BTR: jax.Array | None


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
    plan, held_B = layer_plan(cfg), cache.length_B
    span = Span(held_B, lengths_B, tokens_BT.shape[1])
    end_B, tail = span.end_B, cfg.decoder_tail
    tokens_BT = jnp.where(span.valid_BT, tokens_BT, 0)

    streams = jnp.repeat(params["embed"][tokens_BT][:, :, None], cfg.hc_mult, axis=2)
    pre = jnp.zeros((*tokens_BT.shape, cfg.hc_mult), jnp.float32).at[..., 0].set(1)
    ngram_BN, hashed = cache.ngram_BN, [None] * len(plan)
    if cfg.engram_layer_ids:
        ids, pad = params["token_map"][tokens_BT], params["token_map"][cfg.engram_pad_token_id]
        for layer in plan:
            if layer.engram is not None:
                hashed[layer.layer] = engram.hash_rows(ngram_BN, ids, pad, table=layer.engram, cfg=cfg)
        ngram_BN = engram.remember(ngram_BN, ids, lengths_B)

    windows, pools, records = list(cache.windows), list(cache.pools), []
    selection = None
    for layer, weights in zip(plan, params["layers"], strict=True):
        frequency = layer_frequencies(cfg, compressed=layer.ratio > 0)
        keeps, first_B = span.width, jnp.zeros_like(end_B)
        if layer.decoder and mode == "exact":
            keeps = (cfg.num_hidden_layers - layer.layer) * (cfg.sliding_window - 1) + 1
        elif layer.decoder and mode == "replay":
            keeps, first_B = cfg.sliding_window, end_B - cfg.sliding_window
        elif layer.decoder and mode == "encoder":
            keeps = 0
        if layer.role is not Role.FULL:
            if keeps == 0:
                break
            span, crop = span.last(keeps)
            streams, pre, selection, hashed = crop((streams, pre, selection, hashed))

        if hashed[layer.layer] is not None:
            with jax.named_scope("engram"):
                streams = engram.engram(weights["engram"], streams, hashed[layer.layer], cfg=cfg)
        x = rms_norm(mhc.collapse(pre, streams), weights["attn_norm"], cfg.rms_norm_eps)
        if layer.role is Role.FULL:  # every token makes entries; only then may the layer drop what nobody reads
            with jax.named_scope("compress"):
                pools[layer.pool] = _append(weights["attn"], x, pools[layer.pool], span=span, layer=layer, cfg=cfg)
            if keeps == 0:
                break
            span, crop = span.last(keeps)
            streams, pre, x, hashed = crop((streams, pre, x, hashed))
            selection = None

        pool = None if layer.pool is None else pools[layer.pool]
        where = {"span": span, "held_B": held_B, "first_B": first_B, "frequency": frequency}
        mixed = _block(weights, streams, pre, x, windows[layer.layer], pool, selection, layer=layer, cfg=cfg, **where)
        streams, pre, windows[layer.layer], selection, routes = mixed
        records.append(LayerRecord(span, selection, routes, streams, pre, hashed[layer.layer]))

    owed_B = jnp.maximum(cache.owed_B - lengths_B, 0)
    if mode == "encoder":
        owed_B = jnp.where(lengths_B > 0, tail, cache.owed_B)
    cache = Cache(tuple(windows), tuple(pools), ngram_BN, end_B, owed_B, cache.capacity)
    if mode == "encoder":
        return None, cache, records
    logits = _logits(params, streams, pre, span, read=read, cfg=cfg)
    fine_B = (lengths_B > 0) & (end_B <= cache.capacity) & (owed_B == 0)
    return jnp.where(fine_B.reshape(-1, *[1] * (logits.ndim - 1)), logits, jnp.nan), cache, records


def _append(weights, x, pool: EntryPool, *, span: Span, layer: LayerSpec, cfg: Config) -> EntryPool:
    """Compresses the call's tokens and appends the entries and index keys of the groups they complete."""
    latent, count_B, pool = compressor.compress(
        weights["compressor"], x, pool, span=span, ratio=layer.ratio, cfg=cfg
    )
    frequency = layer_frequencies(cfg, compressed=True)
    first_B = span.start_B // layer.ratio
    entry_BG = first_B[:, None] + jnp.arange(latent.shape[1], dtype=jnp.int32)
    position_BG = entry_BG * layer.ratio  # an entry stands at the first token of its group
    entries = quant.quantize(rotate(latent, position_BG, frequency), cfg.formats.entry)
    keys = indexer.index_keys(weights["indexer"], latent, position_BG, frequency=frequency, cfg=cfg)
    return append_entries(pool, entries, keys, first_B, count_B)


def _block(weights, streams, pre, x, window: Packed, pool, selection, *, layer, span, held_B, first_B, frequency, cfg):
    """Runs attention and experts of one layer; `x` is its collapsed, normalised input.

    Returns streams, the mix that collapses them next, the ring, the selection in force, the routes.
    """
    mix = mhc.mixes(weights, "attn", streams, cfg=cfg)
    with jax.named_scope(f"attention_{layer.role.value}"):
        latent = attention.query_latent(weights["attn"], x, cfg=cfg)
        if layer.role in (Role.FULL, Role.REINDEX):
            selection = indexer.select(
                weights["attn"]["indexer"], x, latent, pool.keys, selection, span=span, layer=layer,
                frequency=frequency, cfg=cfg,
            )  # fmt: skip
        entries, chosen = (None, None) if layer.role is Role.WINDOW else (pool.entries, selection.entry_BTK)
        y, window = attention.attend(
            weights["attn"], x, latent, window, entries, chosen, span=span, held_B=held_B, first_B=first_B,
            frequency=frequency, cfg=cfg,
        )  # fmt: skip
    streams = mhc.expand(mix, y, streams)

    pre, mix = mix.pre, mhc.mixes(weights, "ffn", streams, cfg=cfg)
    with jax.named_scope("moe"):
        x = rms_norm(mhc.collapse(pre, streams), weights["ffn_norm"], cfg.rms_norm_eps)
        y, routes = moe.moe(weights["ffn"], x, top=cfg.num_experts_per_tok, cfg=cfg)
    return mhc.expand(mix, y, streams), mix.pre, window, selection, routes


def _logits(params, streams, pre, span: Span, *, read: str, cfg: Config):
    if read == "last":
        last_B1 = jnp.maximum(span.length_B - 1, 0)[:, None]
        streams, pre = take_rows((streams, pre), last_B1)
    x = rms_norm(mhc.collapse(pre, streams), params["norm"], cfg.rms_norm_eps)
    logits = project(x, params["head"], dtype=jnp.float32)
    return logits[:, 0] if read == "last" else logits
