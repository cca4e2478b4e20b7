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
from v41jax.layers import project
from v41jax.model import Params
from v41jax.training import forward
from v41jax.training.losses import TOKEN_BLOCK
from v41jax.training.packing import Documents

ANCHOR_BLOCK = 256  # blocks whose streams and logits exist at a time: [B, ANCHOR_BLOCK x n, V]


class DraftSums(NamedTuple):
    """Sums over one batch for each of the n places in a block; the loss is a mean of their ratios."""

    loss_n: jax.Array  # f32 [n], nats
    accepted_n: jax.Array  # f32 [n], blocks whose best tokens up to here, this one included, are the backbone's own
    predicted_n: jax.Array  # f32 [n], tokens that were predicted

    def metrics(self) -> dict[str, jax.Array]:
        """The means: "accepted_share" [n] of what is drafted at each place, "accepted" tokens of a block on average.

        Greedy drafting accepts that many where the text is what the backbone itself would say.
        """
        predicted_n = jnp.maximum(self.predicted_n, 1)
        share_n = self.accepted_n / predicted_n
        return {"loss": jnp.mean(self.loss_n / predicted_n), "accepted": share_n.sum(), "accepted_share": share_n}


def train_forward(params: Params, batch: dict[str, Any], *, cfg: Config) -> DraftSums:
    """Runs backbone and draft stages on a packed batch and sums the loss.

    Args:
      params: from `qat.compute_weights`; only "mtp" gets a gradient.
      batch: {"tokens_BT", "document_BT"}, i32; laid out as `packing.align` does.
      cfg: static.
    """
    frozen = jax.lax.stop_gradient(params)
    passed = forward.run(frozen, batch["tokens_BT"], Documents(batch["document_BT"]), cfg=cfg, hidden=True)

    def best(x_BTD):
        return jnp.argmax(project(x_BTD, frozen["head"], dtype=jnp.float32), axis=-1).astype(jnp.int32)

    best_BT = by_query_block(best, TOKEN_BLOCK, passed.x_BTD)
    return draft_loss(params, passed.hidden_BTM, best_BT, batch, cfg=cfg)


def draft_loss(params: Params, hidden_BTM, best_BT, batch: dict[str, Any], *, cfg: Config) -> DraftSums:
    """Sums the cross-entropy of drafted tokens.

    A token at position p of a document is what the backbone has seen last: the block is headed by token p + 1, and its
    place i predicts token p + 2 + i where the document has one.

    Args:
      params: of the whole model, plain floats in "mtp"; only that part gets a gradient.
      hidden_BTM: float, `drafts.main_hidden` of every column; gets none.
      best_BT: i32, the backbone's best next token at every column.
      batch: {"tokens_BT", "document_BT"}, i32; -1 where there is no token.
      cfg: static.
    Returns:
      DraftSums.
    Source: architecture section 9.
    """
    params = {**jax.lax.stop_gradient(params), "mtp": params["mtp"]}
    n, documents = cfg.dspark_block_size, Documents(batch["document_BT"])
    there_BTn = _there(batch, cfg=cfg)
    token_BTn = jnp.where(there_BTn, _ahead(batch["tokens_BT"], 0, n + 1), 0)
    context = drafts.main_rows(params, jax.lax.stop_gradient(hidden_BTM), documents.position_BT, cfg=cfg)

    @jax.checkpoint
    def block(token, there, wanted, index, position):
        x = drafts.run_stages(params, token[..., 0], context, index, position + 1, cfg=cfg)
        first = drafts.own_logits(params, x, cfg=cfg)
        x, first = (a.reshape(*token.shape[:2], n, -1) for a in (x, first))
        logits, _ = drafts.follow(params["mtp"][-1], first, x, token[..., :-1])
        chosen = jnp.take_along_axis(logits, token[..., 1:, None], axis=-1)[..., 0]
        same = there[..., 1:] & (jnp.argmax(logits, axis=-1).astype(jnp.int32) == wanted)
        nats = jnp.where(there[..., 1:], jax.nn.logsumexp(logits, axis=-1) - chosen, 0)
        return nats, jnp.cumprod(same, axis=-1, dtype=jnp.float32)

    seen = documents.window_BTW(cfg.sliding_window)
    wanted_BTn = _ahead(best_BT, 0, n)
    loss, accepted = by_query_block(block, ANCHOR_BLOCK, token_BTn, there_BTn, wanted_BTn, seen, documents.position_BT)
    return DraftSums(loss.sum((0, 1)), accepted.sum((0, 1)), predicted(batch, cfg=cfg))


def predicted(batch: dict[str, Any], *, cfg: Config):
    """Counts the tokens each place of the blocks of a batch predicts: f32 [n]."""
    return jnp.sum(_there(batch, cfg=cfg)[..., 1:], axis=(0, 1), dtype=jnp.float32)


def _there(batch: dict[str, Any], *, cfg: Config):
    """Whether head and places of the block behind each column are tokens of its document: bool [B, T, n + 1]."""
    document_BT = batch["document_BT"]
    ahead_BTn = _ahead(document_BT, -1, cfg.dspark_block_size + 1)
    return (ahead_BTn == document_BT[..., None]) & (document_BT >= 0)[..., None]


def _ahead(values_BT, fill: int, count: int):
    """What stands 1 to `count` columns on: [B, T, count]."""
    T = values_BT.shape[1]
    padded = jnp.pad(values_BT, ((0, 0), (0, count)), constant_values=fill)
    return jnp.stack([padded[:, i : i + T] for i in range(1, count + 1)], axis=-1)
