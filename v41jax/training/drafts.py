"""The loss of the draft stages behind a frozen backbone, every token of a packed batch the head of a block.

Teacher-forced: each place in a block follows the corpus' own tokens. The confidence head gets no gradient: section 9
gives it no objective.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.blocks import by_query_block
from v41jax import drafts
from v41jax.config import Config
from v41jax.model import Params
from v41jax.training.packing import Documents

ANCHOR_BLOCK = 64  # blocks whose streams and logits exist at a time: [B, ANCHOR_BLOCK x n, V]


class DraftSums(NamedTuple):
    """Sums over one batch for each of the n places in a block; the loss is a mean of their ratios."""

    loss_n: jax.Array  # f32 [n], nats
    predicted_n: jax.Array  # f32 [n], tokens that were predicted


def draft_loss(params: Params, hidden_BTM, batch: dict[str, Any], *, cfg: Config) -> DraftSums:
    """Sums the cross-entropy of drafted tokens.

    A token at position p of a document is what the backbone has seen last: the block is headed by token p + 1, and its
    place i predicts token p + 2 + i where the document has one.

    Args:
      params: of the whole model, plain floats in "mtp"; only that part gets a gradient.
      hidden_BTM: float, `drafts.main_hidden` of every column; gets none.
      batch: {"tokens_BT", "document_BT"}, i32; -1 where there is no token.
      cfg: static.
    Returns:
      DraftSums.
    Source: architecture section 9.
    """
    params = {**jax.lax.stop_gradient(params), "mtp": params["mtp"]}
    n, documents, T = cfg.dspark_block_size, Documents(batch["document_BT"]), batch["tokens_BT"].shape[1]

    def ahead(values_BT, fill):
        """What stands 1 to n + 1 columns on: [B, T, n + 1]."""
        padded = jnp.pad(values_BT, ((0, 0), (0, n + 1)), constant_values=fill)
        return jnp.stack([padded[:, i : i + T] for i in range(1, n + 2)], axis=-1)

    there_BTn = (ahead(documents.document_BT, -1) == documents.document_BT[..., None]) & documents.valid_BT[..., None]
    token_BTn = jnp.where(there_BTn, ahead(batch["tokens_BT"], 0), 0)
    context = drafts.main_rows(params, jax.lax.stop_gradient(hidden_BTM), documents.position_BT, cfg=cfg)

    @jax.checkpoint
    def nats(token, there, index, position):
        x = drafts.run_stages(params, token[..., 0], context, index, position + 1, cfg=cfg)
        first = drafts.own_logits(params, x, cfg=cfg)
        x, first = (a.reshape(*token.shape[:2], n, -1) for a in (x, first))
        logits, _ = drafts.follow(params["mtp"][-1], first, x, token[..., :-1])
        chosen = jnp.take_along_axis(logits, token[..., 1:, None], axis=-1)[..., 0]
        return jnp.where(there[..., 1:], jax.nn.logsumexp(logits, axis=-1) - chosen, 0)

    seen = documents.window_BTW(cfg.sliding_window)
    loss = by_query_block(nats, ANCHOR_BLOCK, token_BTn, there_BTn, seen, documents.position_BT)
    return DraftSums(loss.sum((0, 1)), jnp.sum(there_BTn[..., 1:], axis=(0, 1), dtype=jnp.float32))
