"""What a model is worth: held-out loss and passkey retrieval, through the inference path with its packed caches."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import config, drafts
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


class Acceptance(NamedTuple):
    """What greedy drafting behind greedy tokens is worth."""

    share_n: list[float]  # of blocks whose first 1, 2, ... n drafts are all the backbone's own tokens
    tokens_a_call: float  # of the backbone: the drafts it accepts and the token it adds


def draft_acceptance(
    params: Params, corpus: Corpus, *, cfg: Config, length: int, new_tokens: int, prompts: int, batch_size: int
) -> Acceptance:
    """Measures how many drafted tokens are those the backbone goes on to say.

    Every token of a greedy answer heads a block, so `share_n` is over all of them; `tokens_a_call` is over the blocks
    at which speculative decoding stops. An answer goes on past its end token.

    Args:
      params, cfg: a released model with draft stages.
      corpus: held-out documents; the first `length` tokens of those that have as many are prompts.
      length: tokens of a prompt.
      new_tokens: tokens of an answer, more than a block.
      prompts: how many, in order.
      batch_size: prompts a call.
    Raises:
      ValueError: answers no longer than a block, no document of `length` tokens, a model without draft stages.
    """
    n = cfg.dspark_block_size
    if new_tokens <= n:
        raise ValueError(f"new_tokens={new_tokens}; a block is {n} tokens, so an answer needs {n + 1} or more")
    starts = [document[:length] for document in documents(corpus) if len(document) >= length][:prompts]
    if not starts:
        raise ValueError(f"no held-out document has {length} tokens, those of a prompt")
    prefix_RSn = []
    for first in range(0, len(starts), batch_size):
        some = np.stack(starts[first : first + batch_size]).astype(np.int32)
        caches = init_cache(cfg, len(some), _up(length + new_tokens, cfg)), drafts.init_draft_cache(cfg, len(some))
        token_B, *caches = _seed_prompt(params, *caches, some, cfg=cfg)
        token_SB, draft_SBn = (np.asarray(a) for a in _draft_along(params, *caches, token_B, new_tokens, cfg=cfg))
        said_SBn = np.stack([token_SB[i : new_tokens - n + i] for i in range(1, n + 1)], axis=-1)
        prefix = np.cumprod(draft_SBn[: new_tokens - n] == said_SBn, axis=-1)
        prefix_RSn += list(prefix.swapaxes(0, 1))
    calls = [call for prefix in prefix_RSn for call in accepted_tokens(prefix.sum(-1))]
    return Acceptance(np.mean(prefix_RSn, axis=(0, 1)).tolist(), float(np.mean(calls)))


def accepted_tokens(accepted_S) -> list[int]:
    """The tokens of each call of speculative decoding, if the block behind token s has accepted_S[s] right drafts."""
    calls, s = [], 0
    while s < len(accepted_S):
        calls.append(int(accepted_S[s]) + 1)
        s += calls[-1]
    return calls


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames=("cache", "rings"))
def _seed_prompt(params, cache, rings, tokens_BT, *, cfg: Config):
    lengths_B = jnp.full((tokens_BT.shape[0],), tokens_BT.shape[1], jnp.int32)
    return _feed(params, cache, rings, tokens_BT, lengths_B, cfg=cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "count"))
def _draft_along(params, cache, rings, token_B, count: int, *, cfg: Config):
    """Greedy tokens i32 [S, B], the given one first, and the block drafted behind each, i32 [S, B, n]."""

    def one(carry, _):
        token_B, cache, rings = carry
        drafted = drafts.draft(params, rings, token_B, cfg=cfg)
        carry = _feed(params, cache, rings, token_B[:, None], jnp.ones_like(token_B), cfg=cfg)
        return carry, (token_B, drafted.token_BT)

    return jax.lax.scan(one, (token_B, cache, rings), None, length=count)[1]


def _feed(params, cache, rings, tokens_BT, lengths_B, *, cfg: Config):
    """Returns the best next token i32 [B], the cache, and the seeded rings."""
    logits, cache, records = run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full")
    hidden, span = drafts.main_hidden(params, records, cfg=cfg)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache, drafts.seed(params, rings, hidden, span, cfg=cfg)


def _up(tokens: int, cfg: Config) -> int:
    """Rounds up to whole groups of every layer."""
    return tokens + -tokens % config.group_multiple(cfg)


@functools.partial(jax.jit, static_argnames="cfg", donate_argnames="cache")
def _best_tokens(params, cache, tokens_BT, lengths_B, *, cfg: Config):
    logits, cache, _ = run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full", read="all")
    assert logits is not None  # only an encoder has none
    return jnp.argmax(logits, axis=-1), cache


def passkey_accuracy(
    params: Params, task: PasskeyTask, *, cfg: Config, length: int, count: int, batch_size: int, capacity: int
) -> float:
    """The share of single-key documents of `length` tokens whose whole answer greedy generation gets right.

    Depths are spread evenly over the documents. The answer is fed as it is told, and each of its tokens has to be the
    best one at its place, which is when greedy generation gives that answer. Documents of all lengths that have the
    same `capacity`, in tokens, run the same compiled programs.
    """
    capacity = _up(max(capacity, length), cfg)
    right, width = 0, min(CHUNK, capacity)
    for first in range(0, count, batch_size):
        some = [
            task.document(index, length=length, depth=index / max(1, count - 1))
            for index in range(first, min(first + batch_size, count))
        ]
        tokens_BT = np.stack([document.tokens_T for document in some])
        answer = int(some[0].answer_T.sum())
        assert all(document.answer_T.sum() == answer for document in some), "answers differ in tokens"
        split = length - answer - 1  # the last prompt token predicts the first answer token
        cache = init_cache(cfg, len(some), capacity)
        for start in range(0, split, width):
            part = tokens_BT[:, start : min(start + width, split)]
            lengths_B = np.full(len(some), part.shape[1], np.int32)
            part = np.pad(part, ((0, 0), (0, width - part.shape[1])))
            _, cache = prefill(params, cache, part, cfg=cfg, lengths_B=lengths_B, mode="full")
        lengths_B = np.full(len(some), answer, np.int32)
        best, _ = _best_tokens(params, cache, tokens_BT[:, split:-1], lengths_B, cfg=cfg)
        right += int(np.all(np.asarray(best) == tokens_BT[:, split + 1 :], axis=1).sum())
    return right / count
