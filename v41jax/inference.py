"""The doors of the model: prefill, decode and forward.

Each checks its input before any work, then calls `model.run` jitted with the cache donated: a cache that was passed in
is gone, and the returned one takes its place.
"""

import functools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from v41jax import config
from v41jax.cache import Cache, init_cache
from v41jax.config import Config, Mode
from v41jax.model import Params, run


def prefill(params: Params, cache: Cache, tokens_BT, *, cfg: Config, lengths_B=None, mode: Mode = "exact"):
    """Feeds prompt tokens, in one call or chunk by chunk, and predicts the next token.

    Any split of a prompt gives the same logits and cache, and so does any company in the batch.

    Args:
      params: from `load_checkpoint` or `init_params`.
      cache: from `init_cache` or the last call; donated.
      tokens_BT: i32 token ids; a row's tokens stand left, what is behind them is ignored.
      cfg: the model.
      lengths_B: i32 tokens of each row, 0..T; None: all T.
      mode: "exact" runs the decoder layers only on tokens whose results something reads; "full" on all; "replay" on the
        last `sliding_window` with windows cut at their start, an approximation (prefill.md).
    Returns:
      f32 logits [B, V] of each row's last token, NaN in a row without tokens; the next cache.
    Raises:
      ValueError: bad shapes, modes, token ids or lengths, a donated cache, or a row that would pass the capacity. Under
        an outer jit the last cannot be seen: such a row's logits are NaN.
    Source: prefill.md; reference `Transformer.forward`.
    """
    if mode not in get_args(Mode):
        raise ValueError(f"mode={mode!r}; legal are {', '.join(get_args(Mode))}")
    tokens_BT, lengths_B = _check(tokens_BT, lengths_B, cache, cfg=cfg)
    return run_jitted(params, cache, tokens_BT, lengths_B, cfg=cfg, mode=mode)


def prefill_encoder(params: Params, cache: Cache, tokens_BT, *, cfg: Config, lengths_B=None) -> Cache:
    """Feeds an early chunk of a long prompt to the layers that fill the global pools, and to no decoder layer.

    Exact, and half the work, where at least `cfg.decoder_tail` more prompt tokens of the same row follow: the decoder
    reads nothing older. Until they have come (`Cache.owed_B`), `prefill` gives NaN and `decode` refuses.
    Arguments and errors as in `prefill`.
    """
    tokens_BT, lengths_B = _check(tokens_BT, lengths_B, cache, cfg=cfg)
    return run_jitted(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="encoder")[1]


def decode(params: Params, cache: Cache, token_B, *, cfg: Config):
    """Feeds one token a row.

    Reading the lengths for its checks waits for the cache; a loop that has checked its capacity once can scan
    `model.run` instead, as `generate.stream` does.

    Returns:
      f32 logits [B, V] for the next token, and the next cache.
    Raises:
      ValueError: as `prefill`, and where `prefill_encoder` still owes prompt tokens.
    """
    if len(np.shape(token_B)) != 1:
        raise ValueError(f"token_B has shape {np.shape(token_B)}; decode takes one token a row, shape (batch,)")
    token_B = token_B if isinstance(token_B, jax.Array) else np.asarray(token_B)
    tokens_BT, lengths_B = _check(token_B[:, None], None, cache, cfg=cfg)
    if not isinstance(cache.owed_B, Tracer) and np.any(cache.owed_B):
        owed = int(np.max(cache.owed_B))
        raise ValueError(f"decode: {owed} more prompt tokens must go through prefill before the windows are exact")
    return run_jitted(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full")


def forward(params: Params, tokens_BT, *, cfg: Config, lengths_B=None):
    """Runs all layers on all tokens of whole sequences, and keeps no cache.

    Returns f32 logits [B, T, V]; those behind a row's length mean nothing. Arguments and errors as in `prefill`.
    """
    tokens_BT, lengths_B = _check(tokens_BT, lengths_B, None, cfg=cfg)
    return _forward(params, tokens_BT, lengths_B, cfg=cfg)


@functools.partial(jax.jit, static_argnames=("cfg", "mode"), donate_argnames="cache")
def run_jitted(params, cache, tokens_BT, lengths_B, *, cfg: Config, mode: str):
    """Runs `model.run` jitted, cache donated, input unchecked; returns last-token logits and the next cache."""
    logits, cache, _ = run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode=mode)
    return logits, cache


@functools.partial(jax.jit, static_argnames="cfg")
def _forward(params, tokens_BT, lengths_B, *, cfg: Config):
    batch, width = tokens_BT.shape
    cache = init_cache(cfg, batch, max(width, config.group_multiple(cfg)))
    return run(params, cache, tokens_BT, lengths_B, cfg=cfg, mode="full", read="all")[0]


def _check(tokens_BT, lengths_B, cache: Cache | None, *, cfg: Config):
    """Checks what can be seen before any work and returns i32 tokens and lengths; traced values pass unseen."""
    tokens_BT, seen = _concrete(tokens_BT, "tokens_BT")
    if tokens_BT.ndim != 2 or 0 in tokens_BT.shape:
        raise ValueError(f"tokens_BT has shape {tokens_BT.shape}; it must be (batch, tokens), 1 or more of each")
    batch, width = tokens_BT.shape
    lengths_B, lengths_seen = _concrete(np.full(batch, width) if lengths_B is None else lengths_B, "lengths_B")
    if lengths_B.shape != (batch,):
        raise ValueError(f"lengths_B has shape {lengths_B.shape}; {batch} rows of tokens need ({batch},)")
    if lengths_seen and not np.all((0 <= lengths_B) & (lengths_B <= width)):
        raise ValueError(f"lengths_B={lengths_B.tolist()}; with {width} columns of tokens legal are 0 to {width}")
    if seen and lengths_seen:
        real = tokens_BT[np.arange(width) < lengths_B[:, None]]
        wrong = real[(real < 0) | (real >= cfg.vocab_size)]
        if wrong.size:
            raise ValueError(f"token id {wrong[0]} is not in the vocabulary; legal are 0 to {cfg.vocab_size - 1}")
    if cache is not None:
        _check_room(cache, lengths_B if lengths_seen else None, batch)
    return jnp.asarray(tokens_BT, jnp.int32), jnp.asarray(lengths_B, jnp.int32)


def _check_room(cache: Cache, lengths_B, batch: int):
    if cache.length_B.shape[0] != batch:
        raise ValueError(f"tokens have {batch} rows, but the cache was made for batch={cache.length_B.shape[0]}")
    if isinstance(cache.length_B, Tracer) or lengths_B is None:
        return
    if cache.length_B.is_deleted():
        raise ValueError("this cache was given to an earlier call, which donated it; use the cache that call returned")
    held_B = np.asarray(cache.length_B)
    row = int(np.argmax(held_B + lengths_B))
    if held_B[row] + lengths_B[row] > cache.capacity:
        raise ValueError(
            f"row {row} holds {held_B[row]} tokens; {lengths_B[row]} more pass the capacity of {cache.capacity}."
            f" Make the cache with init_cache(cfg, batch, {held_B[row] + lengths_B[row]}) or more"
        )


def _concrete(array, name: str):
    """Returns (NumPy array of integers, True), or a traced array and False."""
    traced = isinstance(array, Tracer)
    array = array if traced else np.asarray(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; it must hold integers")
    return array, not traced
