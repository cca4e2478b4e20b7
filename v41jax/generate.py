"""Text generation: sampling, prefill of a ragged batch in buckets, and a decode loop that is traced once.

Everything a run executes is compiled ahead, one program per prefill width and one for decode, so that times exclude
compilation and no step can trace again.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from v41jax.cache import Cache, bytes_per_token, init_cache, window_bytes
from v41jax.config import Config
from v41jax.inference import run_jitted
from v41jax.model import Params, run

SMALLEST_BUCKET = 16  # tokens; a prompt's last chunk is padded to a power of two from here on


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn from the logits."""

    temperature: float = 0.0  # 0 takes the best token, the lowest id on ties
    top_k: int = 0  # keep the k best tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest best tokens whose probabilities reach this sum

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}; it must be 0 (greedy) or more")
        if self.top_k < 0:
            raise ValueError(f"top_k={self.top_k}; it must be 0 (all tokens) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}; it must be over 0 and at most 1")


@dataclasses.dataclass(kw_only=True)
class Stats:
    """What a run cost: seconds, tokens and bytes, filled in by `stream`."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0  # of all rows, without padding
    decode_seconds: float = 0.0
    decode_steps: int = 0
    batch: int = 0
    capacity: int = 0  # tokens a row may hold
    cache_bytes: int = 0
    window_bytes: int = 0  # of one row's rings, at any length
    token_bytes: float = 0  # one more token of capacity


def sample(logits_BV, key_B, sampling: Sampling):
    """Draws one token a row: i32 [B]. A row's draw depends on its own key and logits only.

    Top-k is taken first, then top-p of what it left; among equal logits the lower id ranks higher.
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits = logits_BV / jnp.float32(sampling.temperature)
    if sampling.top_k or sampling.top_p < 1:
        order = jnp.argsort(-logits, axis=-1, stable=True)
        best = jnp.take_along_axis(logits, order, axis=-1)
        if sampling.top_k:
            rank = jnp.arange(best.shape[-1], dtype=jnp.int32)
            best = jnp.where(rank < sampling.top_k, best, -jnp.inf)
        probability = jax.nn.softmax(best, axis=-1)
        before = jnp.cumsum(probability, axis=-1) - probability
        best = jnp.where(before < sampling.top_p, best, -jnp.inf)
        drawn = jax.vmap(jax.random.categorical)(key_B, best)
        return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)
    return jax.vmap(jax.random.categorical)(key_B, logits).astype(jnp.int32)


def step_keys(seed_key, batch: int, step):
    """Makes a key per row: of the seed, the row's place in the batch and the step, nothing else."""
    rows = jax.vmap(functools.partial(jax.random.fold_in, seed_key))(jnp.arange(batch, dtype=jnp.int32))
    return jax.vmap(jax.random.fold_in, in_axes=(0, None))(rows, step)


@functools.partial(jax.jit, static_argnames=("cfg", "sampling"), donate_argnames="cache")
def _decode(params, cache: Cache, token_B, seed_key, step, *, cfg: Config, sampling: Sampling):
    lengths_B = jnp.ones_like(token_B)
    logits, cache, _ = run(params, cache, token_B[:, None], lengths_B, cfg=cfg, mode="full")
    return sample(logits, step_keys(seed_key, token_B.size, step), sampling), cache


@functools.partial(jax.jit, static_argnames="sampling")
def _first(logits_BV, seed_key, *, sampling: Sampling):
    return sample(logits_BV, step_keys(seed_key, logits_BV.shape[0], 0), sampling)


@jax.jit
def _keep(logits_BV, part_BV, lengths_B):
    """Takes the new logits of the rows that had tokens."""
    return jnp.where((lengths_B > 0)[:, None], part_BV, logits_BV)


def _compile(lowered: dict) -> dict:
    """Compiles several programs at once; XLA leaves Python free while it works."""
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda program: program.compile(), lowered.values())
        bar = tqdm(compiled, total=len(lowered), desc="compile", unit="program", disable=None, leave=False)
        return dict(zip(lowered, bar, strict=True))


def check_request(prompts: Sequence[Sequence[int]], *, cfg: Config, max_new_tokens: int, prefill_chunk: int) -> int:
    """Checks a request before a model is loaded, and returns the cache capacity it needs, in tokens."""
    if not prompts or not all(len(prompt) for prompt in prompts):
        raise ValueError(f"{len(prompts)} prompts, one of them empty; every prompt needs a token or more")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}; it must be 1 or more")
    if prefill_chunk < SMALLEST_BUCKET or prefill_chunk & (prefill_chunk - 1):
        raise ValueError(f"prefill_chunk={prefill_chunk}; it must be a power of two from {SMALLEST_BUCKET} on")
    for number, prompt in enumerate(prompts):
        wrong = [token for token in prompt if not 0 <= token < cfg.vocab_size]
        if wrong:
            raise ValueError(f"prompt {number} holds token id {wrong[0]}; legal are 0 to {cfg.vocab_size - 1}")
    needed = max(map(len, prompts)) + max_new_tokens
    if needed > cfg.max_position_embeddings:
        raise ValueError(
            f"a prompt of {needed - max_new_tokens} tokens and {max_new_tokens} new ones need {needed} positions;"
            f" the model has max_position_embeddings={cfg.max_position_embeddings}"
        )
    return needed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """One prefill call of a ragged batch."""

    tokens_BT: np.ndarray  # i32, padded to a bucket
    lengths_B: np.ndarray  # i32
    encoder_only: bool  # every row in it is followed by so many prompt tokens that no decoder layer need see it

    @property
    def kind(self) -> tuple[int, str]:
        """What it is compiled for: its width and prefill mode."""
        return self.tokens_BT.shape[1], "encoder" if self.encoder_only else "exact"


def plan_chunks(prompts: Sequence[Sequence[int]], *, cfg: Config, prefill_chunk: int) -> list[Chunk]:
    """Cuts prompts into chunks of `prefill_chunk` tokens, the last padded to a power of two."""
    length_B = np.array([len(prompt) for prompt in prompts])
    chunks = []
    for first in range(0, int(length_B.max()), prefill_chunk):
        lengths_B = np.clip(length_B - first, 0, prefill_chunk)
        width = max(SMALLEST_BUCKET, 1 << (int(lengths_B.max()) - 1).bit_length())
        tokens_BT = np.zeros((len(prompts), width), np.int32)
        for row, prompt in enumerate(prompts):
            tokens_BT[row, : lengths_B[row]] = prompt[first : first + lengths_B[row]]
        follow_B = length_B - first - lengths_B
        encoder_only = bool(np.all((lengths_B == 0) | (follow_B >= cfg.decoder_tail)))
        chunks.append(Chunk(tokens_BT=tokens_BT, lengths_B=lengths_B.astype(np.int32), encoder_only=encoder_only))
    return chunks


def stream(
    params: Params,
    prompts: Sequence[Sequence[int]],
    *,
    cfg: Config,
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    seed: int = 0,
    prefill_chunk: int = 512,
    stats: Stats | None = None,
) -> Iterator[np.ndarray]:
    """Continues a batch of prompts, token by token.

    Args:
      params, cfg: the model.
      prompts: token ids of each row; lengths may differ.
      max_new_tokens: tokens to yield for each row; leave the iterator earlier to stop.
      sampling, seed: how tokens are drawn; the same seed gives the same tokens.
      prefill_chunk: most prompt tokens a call, a power of two.
      stats: filled in as the run goes on.
    Yields:
      i32 [B], the next token of every row. The step after it is already under way.
    Raises:
      ValueError: an impossible request, before anything is allocated.
    """
    stats = stats if stats is not None else Stats()
    capacity = check_request(prompts, cfg=cfg, max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk)
    chunks = plan_chunks(prompts, cfg=cfg, prefill_chunk=prefill_chunk)
    cache = init_cache(cfg, len(prompts), capacity)
    stats.batch, stats.capacity = len(prompts), capacity
    stats.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    stats.window_bytes, stats.token_bytes = window_bytes(cfg), bytes_per_token(cfg)

    started = time.perf_counter()
    seed_key, token_B = jax.random.key(seed), np.zeros(len(prompts), np.int32)
    logits = jnp.full((len(prompts), cfg.vocab_size), jnp.nan, jnp.float32)
    lowered: dict[Any, jax.stages.Lowered] = {
        "decode": _decode.lower(params, cache, token_B, seed_key, np.int32(0), cfg=cfg, sampling=sampling),
        "first": _first.lower(logits, seed_key, sampling=sampling),
        "keep": _keep.lower(logits, logits, token_B),
    }
    for chunk in chunks:
        if chunk.kind not in lowered:
            lowered[chunk.kind] = run_jitted.lower(
                params, cache, chunk.tokens_BT, chunk.lengths_B, cfg=cfg, mode=chunk.kind[1]
            )
    programs = _compile(lowered)
    stats.compile_seconds = time.perf_counter() - started

    started = time.perf_counter()
    for chunk in tqdm(chunks, desc="prefill", unit="chunk", disable=len(chunks) == 1 or None):
        part, cache = programs[chunk.kind](params, cache, chunk.tokens_BT, chunk.lengths_B)
        if part is not None:
            logits = programs["keep"](logits, part, chunk.lengths_B)
    token_B = programs["first"](logits, seed_key)
    jax.block_until_ready(token_B)
    stats.prefill_seconds = time.perf_counter() - started
    stats.prefill_tokens = sum(map(len, prompts))

    started = time.perf_counter()
    for number in range(1, max_new_tokens):
        following_B, cache = programs["decode"](params, cache, token_B, seed_key, np.int32(number))
        yield np.asarray(token_B)
        token_B = following_B
        stats.decode_steps, stats.decode_seconds = number, time.perf_counter() - started
    yield np.asarray(token_B)
    stats.decode_seconds = time.perf_counter() - started
