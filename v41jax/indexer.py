"""Lightning indexer and HIERARCHICAL SPARSE INDEXER: which entries a query attends to (architecture section 5).

index_keys -> index_scores -> select_candidates -> select_entries. The candidate source scores every visible entry and
keeps the best blocks as the query's candidate pool; later index sources score only inside it, at a cost that does not
grow with the context. Selections and pools belong to one call and are never cached.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.block_max import block_max
from pallas_kernels.masked_topk import masked_topk
from v41jax import quant
from v41jax.cache import take_rows
from v41jax.config import Config, LayerSpec, Role
from v41jax.layers import by_query_block, einsum, project, rms_norm
from v41jax.quant import Packed
from v41jax.rope import rotate
from v41jax.tree import ArraySpec, Specs

QUERY_BLOCK = 32  # queries scored at a time
KEY_TILE = 8192  # keys scored at a time: bounds [B, QUERY_BLOCK, heads, KEY_TILE]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Selection:
    """What the queries of one call attend to, passed from layer to layer.

    entry_BTK: i32 entries, ascending, -1 behind them. block_BTC: i32 candidate blocks, likewise; None before the
    candidate source.
    """

    entry_BTK: jax.Array
    block_BTC: jax.Array | None = None


def specs(cfg: Config, layer: LayerSpec) -> Specs:
    """Describes the indexer's weights; only a KV source makes index keys."""
    width = cfg.index_n_heads * cfg.index_head_dim
    out = {
        "wq_b": ArraySpec(shape=(width, cfg.q_lora_rank), axes=("index_heads", "q_lora"), format=cfg.dense_format),
        "weights_proj": ArraySpec(shape=(cfg.index_n_heads, cfg.hidden_size), axes=("index_heads", "embed")),
    }
    if layer.role is Role.FULL:
        out["wk"] = ArraySpec(shape=(cfg.index_head_dim, cfg.head_dim), axes=(None, "head_dim"))
        out["k_norm"] = ArraySpec(shape=(cfg.index_head_dim,), axes=(None,), init="ones")
    return out


def index_keys(params, latent_BGH, position_BG, *, frequency, cfg: Config) -> Packed:
    """Makes one index key per entry from its latent before RoPE; all heads share it. Returns Packed [B, G, J]."""
    key = rms_norm(project(latent_BGH, params["wk"]), params["k_norm"], cfg.rms_norm_eps)
    return quant.quantize(rotate(key, position_BG, frequency), cfg.formats.index)


def index_queries(params, x_BTD, latent_BTR, position_BT, *, frequency, cfg: Config):
    """Makes index queries [B, T, I, J], rounded as the keys are, and f32 head weights [B, T, I], of either sign."""
    query = project(latent_BTR, params["wq_b"], activation=cfg.formats.activation)
    query = query.reshape(*query.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
    query = quant.fake_quantize(rotate(query, position_BT[..., None], frequency), cfg.formats.index)
    scale = cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5
    return query, project(x_BTD, params["weights_proj"], dtype=jnp.float32) * jnp.float32(scale)


def index_scores(query_BTIJ, weight_BTI, keys: Packed):
    """Scores every key: sum over heads of weight x relu(query . key).

    Args:
      query_BTIJ: float, from `index_queries`.
      weight_BTI: f32.
      keys: Packed [B, S, J], S the capacity; what is not visible is scored too and left to the caller's mask.
    Returns:
      f32 [B, T, S]. ReLU makes exact zeros common.
    """
    S = keys.codes.shape[1]
    if S <= KEY_TILE:
        return _scores("btij,bsj->btis", query_BTIJ, weight_BTI, keys)

    def score_tile(tile, scores):
        first = jnp.minimum(tile * KEY_TILE, S - KEY_TILE)  # the last tile overlaps the one before it
        part = jax.tree.map(lambda plane: lax.dynamic_slice_in_dim(plane, first, KEY_TILE, axis=1), keys)
        part = _scores("btij,bsj->btis", query_BTIJ, weight_BTI, part)
        return lax.dynamic_update_slice_in_dim(scores, part, first, axis=2)

    scores = jnp.zeros((*query_BTIJ.shape[:2], S), jnp.float32)
    return lax.fori_loop(0, -(-S // KEY_TILE), score_tile, scores)


def pool_scores(query_BTIJ, weight_BTI, keys: Packed, block_BTC, *, block_size: int):
    """Scores the entries of each query's candidate blocks only.

    Returns:
      f32 scores [B, T, C * block_size] and the i32 entries they belong to, ascending where blocks are; entries of
      absent blocks (-1) are past every visible count.
    """
    first = jnp.where(block_BTC < 0, (2**31 - 1) // block_size - 1, block_BTC) * block_size
    entry = first[..., None] + jnp.arange(block_size, dtype=jnp.int32)
    entry = entry.reshape(*block_BTC.shape[:2], -1)
    return _scores("btij,btsj->btis", query_BTIJ, weight_BTI, take_rows(keys, entry)), entry


def select_candidates(scores_BTS, visible_BT, *, cfg: Config):
    """Builds each query's candidate pool from the candidate source's scores (report 2.3.2).

    Returns:
      i32 block ids [B, T, C], ascending; -1 behind them where fewer than C blocks are visible.
    """
    best_BTM = block_max(scores_BTS, visible_BT, block_size=cfg.candidate_block_size)
    block_M = jnp.arange(best_BTM.shape[-1], dtype=jnp.int32)

    # The newest block is part-filled: a full one could outscore it, yet it holds the newest tokens.
    newest_BT = (visible_BT - 1) // cfg.candidate_block_size  # -1 where nothing is visible
    best_BTM = jnp.where(block_M == newest_BT[..., None], jnp.inf, best_BTM)
    return masked_topk(best_BTM, k=min(cfg.candidate_topk_blocks, block_M.size))


def select_entries(scores_BTS, entry_BTS, visible_BT, *, k: int):
    """Selects the k best visible entries; equal scores go to the lower entry.

    Args:
      scores_BTS: f32; NaN is never selected.
      entry_BTS: i32 entries the scores belong to, ascending, broadcastable to the scores.
      visible_BT: i32, query t sees entries below it.
    Returns:
      i32 [B, T, k] ascending entries, -1 behind them.
    """
    masked = jnp.where(entry_BTS < visible_BT[..., None], scores_BTS, -jnp.inf)
    position = masked_topk(masked, k=k)
    entry_BTS = jnp.broadcast_to(entry_BTS, scores_BTS.shape)
    return jnp.where(position < 0, -1, jnp.take_along_axis(entry_BTS, jnp.maximum(position, 0), axis=-1))


def select(params, x_BTD, latent_BTR, keys: Packed, carried: Selection | None, *, span, layer, frequency, cfg: Config):
    """Runs the indexer of one Full or Reindex layer, queries in blocks.

    Args:
      x_BTD: normalised input of the layer.
      latent_BTR: low-rank query of the attention.
      keys: index keys of the pool this layer reads, the call's own among them.
      carried: the selection of the layers before; its blocks are the candidate pool.
      span, layer, frequency: where the queries stand, the LayerSpec, the rotation table.
    Returns:
      the new Selection.
    Source: report 2.3.2; reference `Indexer`, with section 11's corrections 2 and 3.
    """
    position_BT, visible_BT = span.position_BT, span.visible_BT(layer.ratio)
    query_BTIJ, weight_BTI = index_queries(params, x_BTD, latent_BTR, position_BT, frequency=frequency, cfg=cfg)
    k = min(cfg.index_topk, keys.codes.shape[1])
    block_BTC = carried.block_BTC if carried is not None and layer.scores_candidates else None

    def select_block(query, weight, visible, block):
        if block is not None:
            scores, entry = pool_scores(query, weight, keys, block, block_size=cfg.candidate_block_size)
            return Selection(select_entries(scores, entry, visible, k=k), block)
        scores = index_scores(query, weight, keys)
        entry = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        block = select_candidates(scores, visible, cfg=cfg) if layer.builds_candidates else None
        return Selection(select_entries(scores, entry, visible, k=k), block)

    return by_query_block(select_block, QUERY_BLOCK, query_BTIJ, weight_BTI, visible_BT, block_BTC)


def _scores(subscripts: str, query_BTIJ, weight_BTI, keys: Packed):
    dots = einsum(subscripts, query_BTIJ, quant.dequantize(keys, query_BTIJ.dtype), dtype=jnp.float32)
    return einsum("btis,bti->bts", jax.nn.relu(dots), weight_BTI, dtype=jnp.float32)
