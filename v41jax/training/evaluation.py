"""What a model is worth: held-out loss and passkey retrieval, through the inference path with its packed caches."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import config
from v41jax.cache import init_cache
from v41jax.config import Config
from v41jax.inference import forward, prefill
from v41jax.model import Params, run
from v41jax.training import data, export, packing, qat
from v41jax.training import forward as training_forward
from v41jax.training.corpus import Corpus, documents
from v41jax.training.passkey import PasskeyTask

CHUNK = 2048  # prompt tokens a call


class Loss(NamedTuple):
    """Mean loss of the tokens that have a token of the same piece before them."""

    nats_per_token: float
    tokens: int


def without_quantized_caches(cfg: Config) -> Config:
    """The same model with window, entries and index keys kept in float32."""
    return dataclasses.replace(cfg, formats=config.UNQUANTIZED)


def without_pool(cfg: Config) -> Config:
    """The same model whose Reindex layers score every entry; it has the same weights."""
    return dataclasses.replace(cfg, candidate_source_layer_id=None)


@functools.partial(jax.jit, static_argnames="cfg")
def _piece_loss(params, tokens_BT, lengths_B, *, cfg: Config):
    logits = forward(params, tokens_BT, cfg=cfg, lengths_B=lengths_B)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens_BT[:, 1:, None], axis=-1)[..., 0]
    loss_BT = jax.nn.logsumexp(logits, axis=-1) - chosen
    predicted = jnp.arange(1, tokens_BT.shape[1], dtype=jnp.int32) < lengths_B[:, None]
    return jnp.sum(jnp.where(predicted, loss_BT, 0))


def held_out_loss(params: Params, corpus: Corpus, *, cfg: Config, length: int, pieces: int, batch_size: int) -> Loss:
    """Measures the loss on the first `pieces` pieces of documents, cut at every `length` tokens.

    Args:
      params, cfg: a released model (FP8 and FP4 weights packed).
      corpus: held-out documents.
      length: most tokens of a piece; each is a sequence of its own.
      pieces: how many, in order; pieces of one token have no loss and are not among them.
      batch_size: pieces a call.
    Raises:
      ValueError: no piece of two tokens or more.
    """
    cut = [d[at : at + length] for d in documents(corpus) for at in range(0, len(d), length)]
    cut = [piece for piece in cut if len(piece) > 1][:pieces]
    if not cut:
        raise ValueError("no held-out document has two tokens; there is nothing to predict")
    total, count = 0.0, 0
    for first in range(0, len(cut), batch_size):
        some = cut[first : first + batch_size]
        tokens_BT, lengths_B = np.zeros((batch_size, length), np.int32), np.zeros(batch_size, np.int32)
        for row, piece in enumerate(some):
            tokens_BT[row, : len(piece)], lengths_B[row] = piece, len(piece)
        total += float(_piece_loss(params, tokens_BT, lengths_B, cfg=cfg))
        count += int(np.sum(np.maximum(lengths_B - 1, 0)))
    return Loss(total / count, count)


def indexer_recall(params: Params, corpus: Corpus, *, cfg: Config, length: int, rows: int) -> list[float]:
    """Measures what share of the attention mass of the K heaviest entries each index source selects.

    Args:
      params, cfg: a released model.
      corpus: held-out documents, packed into rows.
      length: tokens of a row, rounded up to whole candidate blocks.
      rows: how many rows, one batch.
    Returns:
      A mean for each index source, over the queries that see more entries than are selected; NaN where none does.
    """
    multiple = packing.multiple(cfg)
    source = data.PackedRows(corpus, length + -length % multiple, multiple=multiple)
    batch = next(data.valid_batches(source, batch_size=min(rows, len(source))))
    weights = qat.compute_weights(export.to_master(params), cfg=cfg, dtype=jnp.float32, weights=False)
    measure = jax.jit(training_forward.indexer_recall, static_argnames="cfg")
    return np.asarray(measure(weights, batch, cfg=cfg)).tolist()


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def _best_tokens(params, cache, tokens_BT, lengths_B, *, cfg: Config):
    logits, cache, _ = run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full", read="all")
    assert logits is not None  # only an encoder has none
    return jnp.argmax(logits, axis=-1), cache


def passkey_accuracy(
    params: Params, task: PasskeyTask, *, cfg: Config, length: int, count: int, batch_size: int
) -> float:
    """The share of single-key documents of `length` tokens whose whole answer greedy generation gets right.

    Depths are spread evenly over the documents. The answer is fed as it is told, and each of its tokens has to be the
    best one at its place, which is when greedy generation gives that answer.
    """
    right = 0
    for first in range(0, count, batch_size):
        some = [
            task.document(index, length=length, depth=index / max(1, count - 1))
            for index in range(first, min(first + batch_size, count))
        ]
        tokens_BT = np.stack([document.tokens_T for document in some])
        answer = int(some[0].answer_T.sum())
        assert all(document.answer_T.sum() == answer for document in some), "answers differ in tokens"
        split = length - answer - 1  # the last prompt token predicts the first answer token
        cache = init_cache(cfg, len(some), -(-length // config.group_multiple(cfg)) * config.group_multiple(cfg))
        for start in range(0, split, CHUNK):
            _, cache = prefill(params, cache, tokens_BT[:, start : min(start + CHUNK, split)], cfg=cfg, mode="full")
        lengths_B = np.full(len(some), answer, np.int32)
        best, _ = _best_tokens(params, cache, tokens_BT[:, split:-1], lengths_B, cfg=cfg)
        right += int(np.all(np.asarray(best) == tokens_BT[:, split + 1 :], axis=1).sum())
    return right / count
