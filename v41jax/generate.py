"""Text generation: sampling, prefill of a ragged batch in buckets, and a decode loop that is traced once.

Everything a run executes is compiled ahead, one program per prefill width and one for decode, so that times exclude
compilation and no step can trace again.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from v41jax import sampling, speculate
from v41jax.cache import bytes_per_token, init_cache, window_bytes
from v41jax.config import Config
from v41jax.drafts import init_draft_cache
from v41jax.model import Params
from v41jax.sampling import Sampling

GREEDY = Sampling()
SMALLEST_BUCKET = 16  # tokens; a prompt's last chunk is padded to a power of two from here on


@dataclasses.dataclass(kw_only=True)
class Stats:
    """What a run cost: seconds, tokens and bytes, filled in by `stream`."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0
    prefill_tokens: int = 0  # of all rows, without padding
    decode_seconds: float = 0.0
    decode_steps: int = 0
    decode_tokens: int = 0  # of all rows, with the first, which prefill gives
    batch: int = 0
    capacity: int = 0  # tokens a row may hold
    cache_bytes: int = 0
    window_bytes: int = 0  # of one row's rings, at any length
    token_bytes: float = 0  # one more token of capacity


_prefill = jax.jit(speculate.feed, static_argnames=("cfg", "mode"), donate_argnames=("cache", "rings"))
_step = jax.jit(speculate.step, static_argnames="cfg", donate_argnames="state")
_first = jax.jit(sampling.sample)


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
    settings: Sampling = GREEDY,
    seed: int = 0,
    prefill_chunk: int = 512,
    drafts: bool = False,
    least_chance: float = 0.0,
    stats: Stats | None = None,
) -> Iterator[np.ndarray]:
    """Continues a batch of prompts, step by step.

    Args:
      params, cfg: the model.
      prompts: token ids of each row; lengths may differ.
      max_new_tokens: tokens to yield for each row; leave the iterator earlier to stop.
      settings, seed: how tokens are drawn; the same seed gives the same tokens.
      prefill_chunk: most prompt tokens a call, a power of two.
      drafts: decode speculatively: the same tokens at temperature 0, the same distribution at any other.
      least_chance: see `speculate.step`.
      stats: filled in as the run goes on.
    Yields:
      i32 [B, C], the next tokens of every row, -1 behind them: one without drafts, up to a block and one more with
      them, none in a row that has had all. The step after it is already under way.
    Raises:
      ValueError: an impossible request, before anything is allocated.
    """
    stats = stats if stats is not None else Stats()
    capacity = check_request(prompts, cfg=cfg, max_new_tokens=max_new_tokens, prefill_chunk=prefill_chunk)
    speculate.check(cfg, drafts=drafts, least_chance=least_chance)
    chunks = plan_chunks(prompts, cfg=cfg, prefill_chunk=prefill_chunk)
    batch, chance = len(prompts), np.float32(least_chance)
    cache, rings = init_cache(cfg, batch, capacity), init_draft_cache(cfg, batch) if drafts else None
    stats.batch, stats.capacity = batch, capacity
    stats.cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves((cache, rings)))
    stats.window_bytes, stats.token_bytes = window_bytes(cfg), bytes_per_token(cfg)

    started = time.perf_counter()
    rows = sampling.rows([settings] * batch, sampling.row_keys(seed, batch))
    logits = jnp.full((batch, cfg.vocab_size), jnp.nan, jnp.float32)
    left_B = jnp.full((batch,), max_new_tokens - 1, jnp.int32)
    state = speculate.Decoding(cache, rings, jnp.zeros((batch,), jnp.int32), left_B, rows)
    lowered: dict[Any, jax.stages.Lowered] = {
        "step": _step.lower(params, state, chance, cfg=cfg),
        "first": _first.lower(logits, rows, state.token_B),
        "keep": _keep.lower(logits, logits, state.token_B),
    }
    for chunk in chunks:
        if chunk.kind not in lowered:
            lowered[chunk.kind] = _prefill.lower(
                params, cache, rings, chunk.tokens_BT, chunk.lengths_B, cfg=cfg, mode=chunk.kind[1]
            )
    programs = _compile(lowered)
    stats.compile_seconds = time.perf_counter() - started

    started = time.perf_counter()
    for chunk in tqdm(chunks, desc="prefill", unit="chunk", disable=len(chunks) == 1 or None):
        part, cache, rings = programs[chunk.kind](params, cache, rings, chunk.tokens_BT, chunk.lengths_B)
        if part is not None:
            logits = programs["keep"](logits, part, chunk.lengths_B)
    token_B = programs["first"](logits, rows, cache.length_B)
    stats.prefill_tokens = sum(map(len, prompts))
    jax.block_until_ready(token_B)
    stats.prefill_seconds = time.perf_counter() - started

    started = time.perf_counter()
    state, made_BT = speculate.Decoding(cache, rings, token_B, left_B, rows), token_B[:, None]
    most_left_B = np.full(batch, max_new_tokens - 1)  # behind all steps under way, of which each makes one or more
    while made_BT is not None:
        following_BT = None
        if np.any(most_left_B > 0):
            made, state = programs["step"](params, state, chance)
            following_BT, most_left_B = made.token_BT, most_left_B - 1
        made_BT = np.asarray(made_BT)
        count_B = np.sum(made_BT >= 0, axis=1)
        most_left_B = most_left_B - np.maximum(count_B - 1, 0)
        stats.decode_tokens += int(count_B.sum())
        stats.decode_seconds = time.perf_counter() - started
        if np.any(count_B):
            yield made_BT
        stats.decode_steps += following_BT is not None
        made_BT = following_BT
    stats.decode_seconds = time.perf_counter() - started
