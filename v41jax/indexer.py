"""Lightning indexer and HIERARCHICAL SPARSE INDEXER: which entries a query attends to (architecture section 5).

index_keys -> index_scores -> candidate_blocks -> select_in_blocks. A Full layer scores every visible entry, keeps the
maximum of each block, and rescores its best blocks only; the candidate source keeps more of them as the query's pool.
Later index sources score only inside the pool, at a cost that does not grow with the context. Selections and pools
belong to one call and are never cached.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels.block_max import block_max
from pallas_kernels.blocks import by_query_block, fitting
from pallas_kernels.index_scores import index_scores
from pallas_kernels.masked_topk import masked_topk
from pallas_kernels.pool_scores import pool_scores
from v41jax import quant
from v41jax.config import Config, LayerSpec, Role
from v41jax.layers import project, rms_norm
from v41jax.quant import Packed
from v41jax.rope import rotate, turn
from v41jax.tree import ArraySpec, Specs

FEW_BLOCKS = 512  # up to as many blocks every entry is scored and compared


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


def index_key(params, latent_BGH, *, cfg: Config):
    """Projects latents to index keys [B, G, J], not yet rotated or rounded."""
    return rms_norm(project(latent_BGH, params["wk"]), params["k_norm"], cfg.rms_norm_eps)


def index_keys(params, latent_BGH, position_BG, *, frequency, cfg: Config) -> Packed:
    """Makes one index key per entry from its latent before RoPE; all heads share it. Returns Packed [B, G, J]."""
    key = index_key(params, latent_BGH, cfg=cfg)
    return quant.rotate_quantize(key, turn(position_BG, frequency), cfg.formats.index)


def index_queries(params, x_BTD, latent_BTR, position_BT, *, frequency, cfg: Config):
    """Makes index queries [B, T, I, J], rounded as the keys are, and f32 head weights [B, T, I], of either sign."""
    query = project(latent_BTR, params["wq_b"], activation=cfg.formats.activation)
    query = query.reshape(*query.shape[:-1], cfg.index_n_heads, cfg.index_head_dim)
    query = quant.fake_quantize(rotate(query, position_BT[..., None], frequency), cfg.formats.index)
    scale = cfg.index_head_dim**-0.5 * cfg.index_n_heads**-0.5
    return query, project(x_BTD, params["weights_proj"], dtype=jnp.float32) * jnp.float32(scale)


def candidate_blocks(best_BTM, visible_BT, *, cfg: Config):
    """Builds each query's candidate pool from block maxima of the candidate source's scores (report 2.3.2).

    Returns:
      i32 block ids [B, T, C], ascending; -1 behind them where fewer than C blocks are visible.
    """
    block_M = jnp.arange(best_BTM.shape[-1], dtype=jnp.int32)

    # The newest block is part-filled: a full one could outscore it, yet it holds the newest tokens.
    newest_BT = (visible_BT - 1) // cfg.candidate_block_size  # -1 where nothing is visible
    best_BTM = jnp.where(block_M == newest_BT[..., None], jnp.inf, best_BTM)
    return masked_topk(best_BTM, newest_BT + 1, k=min(cfg.candidate_topk_blocks, block_M.size))


def select_in_blocks(query_BTIJ, weight_BTI, keys: Packed, block_BTC, visible_BT, *, k: int, cfg: Config):
    """Selects the k best visible entries of each query's blocks; equal scores go to the lower entry.

    Args:
      query_BTIJ, weight_BTI: from `index_queries`.
      keys: Packed [B, S, J].
      block_BTC: i32 ascending block ids, -1 behind them.
      visible_BT: i32, query t sees entries below it.
    Returns:
      i32 [B, T, k] ascending entries, -1 behind them.
    """
    size = cfg.candidate_block_size
    scores = pool_scores(
        query_BTIJ, weight_BTI, keys.codes, keys.scales, block_BTC, visible_BT, format=keys.format, block_size=size
    )
    position = masked_topk(scores, k=k)
    block = jnp.take_along_axis(block_BTC, jnp.maximum(position, 0) // size, axis=-1)
    return jnp.where(position < 0, -1, block * size + position % size)


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
    position_BT, visible_BT, first_BT = span.position_BT, span.visible_BT(layer.ratio), span.first_BT(layer.ratio)
    query_BTIJ, weight_BTI = index_queries(params, x_BTD, latent_BTR, position_BT, frequency=frequency, cfg=cfg)
    k = min(cfg.index_topk, keys.codes.shape[1])
    block_BTC = carried.block_BTC if carried is not None and layer.scores_candidates else None

    def own(scores, first, width):
        """Hides what stands before a document's first entry, which is the first of a block."""
        if first is None:
            return scores
        position = jnp.arange(scores.shape[-1], dtype=jnp.int32)
        return jnp.where(position >= (first // width)[..., None], scores, -jnp.inf)

    def select_block(query, weight, visible, block, first):
        if block is not None:
            return Selection(select_in_blocks(query, weight, keys, block, visible, k=k, cfg=cfg), block)
        size = cfg.candidate_block_size
        planes = (keys.codes, keys.scales, visible)
        if -(-keys.codes.shape[1] // size) <= max(k, FEW_BLOCKS):  # choosing blocks first would leave nothing out
            scores = own(index_scores(query, weight, *planes, format=keys.format), first, 1)
            entry = masked_topk(scores, visible, k=k)
            best = block_max(scores, visible, block_size=size) if layer.builds_candidates else None
        else:
            best = own(index_scores(query, weight, *planes, format=keys.format, block_size=size), first, size)
            # The k best entries lie in the k best blocks (section 6), so no score of the others is ever needed again.
            kept = masked_topk(best, -(-visible // size), k=k)
            entry = select_in_blocks(query, weight, keys, kept, visible, k=k, cfg=cfg)
        block = candidate_blocks(best, visible, cfg=cfg) if layer.builds_candidates else None
        return Selection(entry, block)

    B, entries = keys.codes.shape[:2]
    blocks = -(-entries // cfg.candidate_block_size)
    block = fitting(4 * B * (entries if blocks <= FEW_BLOCKS else blocks))  # bounds scores, or block maxima
    return by_query_block(select_block, block, query_BTIJ, weight_BTI, visible_BT, block_BTC, first_BT)
