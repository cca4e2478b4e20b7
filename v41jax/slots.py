"""What an engine runs on the device: a fixed batch of slots that decode, and one row beside them that takes a prompt.

A prompt goes chunk by chunk into a row of its own, the staged one, between steps of the others, and is copied into a
free slot when it is whole. So no program has a shape that depends on who is served: a step, a chunk of each width, and
the copy are compiled once. Slots have fixed room and not pages: a row of a pool is contiguous, as every kernel reads
it, a sequence costs the copy of one row once, and no step looks up a page.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from v41jax import prefixes, sampling, speculate
from v41jax.cache import Cache, init_cache
from v41jax.config import Config
from v41jax.drafts import DraftCache, init_draft_cache
from v41jax.model import Params
from v41jax.sampling import Rows, Sampling

SMALLEST_BUCKET = 16  # tokens; a prompt's last chunk is padded to a power of two from here on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """The fixed sizes of an engine."""

    slots: int = 8  # sequences that decode at once
    capacity: int = 4096  # tokens a sequence may hold, prompt and answer together
    prefill_chunk: int = 512  # most prompt tokens a call, a power of two
    drafts: bool = False  # decode speculatively
    least_chance: float = 0.0  # see `speculate.step`
    prefix_bytes: int = 0  # host memory for prefixes of prompts (`prefixes`); 0 keeps none

    def check(self, cfg: Config):
        """Raises ValueError for sizes that this model cannot have."""
        if self.slots < 1:
            raise ValueError(f"slots={self.slots}; an engine has 1 or more")
        if self.prefill_chunk < SMALLEST_BUCKET or self.prefill_chunk & (self.prefill_chunk - 1):
            raise ValueError(f"prefill_chunk={self.prefill_chunk}; it must be a power of two from {SMALLEST_BUCKET} on")
        if not 2 <= self.capacity <= cfg.max_position_embeddings:
            raise ValueError(
                f"capacity={self.capacity} tokens; legal are 2 to max_position_embeddings={cfg.max_position_embeddings}"
            )
        speculate.check(cfg, drafts=self.drafts, least_chance=self.least_chance)
        if self.prefix_bytes < 0:
            raise ValueError(f"prefix_bytes={self.prefix_bytes}; it must be 0 (keep no prefixes) or more")
        if self.prefix_bytes:
            prefixes.check(cfg, self.prefill_chunk)


class Chunk(NamedTuple):
    """One call of prefill."""

    tokens_1T: np.ndarray  # i32 [1, T], padded to a bucket
    length: int
    mode: str  # "encoder" where so many prompt tokens follow that no decoder layer need see these, else "exact"

    @property
    def kind(self) -> tuple[int, str]:
        """What it is compiled for."""
        return self.tokens_1T.shape[1], self.mode


def plan_chunks(prompt: Sequence[int], *, cfg: Config, prefill_chunk: int) -> list[Chunk]:
    """Cuts a prompt into chunks of `prefill_chunk` tokens, the last padded to a power of two.

    The cuts depend on nothing but the prompt's length, so that the same prompt runs through the same programs always.
    """
    chunks = []
    for first in range(0, len(prompt), prefill_chunk):
        part = prompt[first : first + prefill_chunk]
        tokens_1T = np.zeros((1, max(SMALLEST_BUCKET, 1 << (len(part) - 1).bit_length())), np.int32)
        tokens_1T[0, : len(part)] = part
        follow = len(prompt) - first - len(part)
        chunks.append(Chunk(tokens_1T, len(part), "encoder" if follow >= cfg.decoder_tail else "exact"))
    return chunks


def chunk_kinds(layout: Layout, cfg: Config) -> list[tuple[int, str]]:
    """Lists the kinds of chunk that prompts below the capacity can have."""
    widths, longest = [SMALLEST_BUCKET], min(layout.prefill_chunk, layout.capacity - 1)
    while widths[-1] < longest:
        widths.append(2 * widths[-1])
    skips = layout.capacity - 1 - layout.prefill_chunk >= cfg.decoder_tail
    return [(width, "exact") for width in widths] + [(layout.prefill_chunk, "encoder")] * skips


class Staged(NamedTuple):
    """The row that takes a prompt."""

    cache: Cache
    rings: DraftCache | None


def empty_staged(cfg: Config, layout: Layout) -> Staged:
    """Allocates the row that takes a prompt."""
    return Staged(init_cache(cfg, 1, layout.capacity), init_draft_cache(cfg, 1) if layout.drafts else None)


def empty_slots(cfg: Config, layout: Layout) -> speculate.Decoding:
    """Allocates slots, all at rest."""
    B = layout.slots
    return speculate.Decoding(
        init_cache(cfg, B, layout.capacity),
        init_draft_cache(cfg, B) if layout.drafts else None,
        jnp.zeros((B,), jnp.int32),
        jnp.zeros((B,), jnp.int32),
        sampling.rows([Sampling()] * B, sampling.row_keys(0, B)),
    )


def feed(params: Params, staged: Staged, tokens_1T, lengths_1, *, cfg: Config, mode: str):
    """Feeds a chunk to the staged row; returns its last token's logits (None in mode "encoder") and the row."""
    logits, cache, rings = speculate.feed(
        params, staged.cache, staged.rings, tokens_1T, lengths_1, cfg=cfg, mode=mode
    )  # fmt: skip
    return logits, Staged(cache, rings)


def put(staged: Staged, block, first) -> Staged:
    """Writes a block of a known prefix into the staged row; see `prefixes.put`."""
    return staged._replace(cache=prefixes.put(staged.cache, block, first))


def resume(staged: Staged, start, kept, ngram_1N) -> Staged:
    """Sets the staged row to be fed from token `start` on; see `prefixes.resume`."""
    cache, rings = prefixes.resume(staged.cache, start, kept, ngram_1N), staged.rings
    return Staged(cache, None if rings is None else dataclasses.replace(rings, length_B=cache.length_B))


def admit(state: speculate.Decoding, staged: Staged, logits_1V, rows: Rows, slot, left):
    """Draws the token behind a staged prompt and copies the row into a slot.

    Args:
      state: the slots; donate it.
      staged: the row, its prompt whole; not changed.
      logits_1V: f32, of its last token.
      rows: of one row.
      slot: i32, which slot; whatever was there is overwritten.
      left: i32, tokens to make after this one.
    Returns:
      sampling.Made of the one token, and the slots.
    """
    token_1 = sampling.sample(logits_1V, rows, staged.cache.length_B)
    made = sampling.report(token_1[:, None], logits_1V[:, None], rows)
    row = speculate.Decoding(staged.cache, staged.rings, token_1, jnp.reshape(left, (1,)), rows)

    def put(whole, one):
        return jax.lax.dynamic_update_index_in_dim(whole, one[0], slot, 0)

    return made, jax.tree.map(put, state, row)


def clear(staged: Staged) -> Staged:
    """Empties the staged row, so that nothing of a prompt outlives it there; donate it."""
    empty = jax.tree.map(jnp.zeros_like, staged)
    return empty._replace(cache=dataclasses.replace(empty.cache, ngram_BN=empty.cache.ngram_BN - 1))


def step(params: Params, state: speculate.Decoding, goes_on_B, least_chance, *, cfg: Config):
    """Runs `speculate.step` on the slots; those where `goes_on_B` is False rest from now on."""
    left_B = jnp.where(goes_on_B, state.left_B, 0)
    return speculate.step(params, dataclasses.replace(state, left_B=left_B), least_chance, cfg=cfg)


class Programs:
    """The compiled programs of one engine: each is compiled when it is first asked for, or ahead by `warm`."""

    def __init__(self, params: Params, cfg: Config, layout: Layout):
        """Compiles nothing yet; arrays are described, not made."""
        self._cfg, self._layout = cfg, layout
        self._params = jax.tree.map(_described, params)
        self._staged = jax.eval_shape(lambda: empty_staged(cfg, layout))
        self._state = jax.eval_shape(lambda: empty_slots(cfg, layout))
        self._compiled: dict[Any, jax.stages.Compiled] = {}

    def __getitem__(self, kind):
        """Returns the program of a kind: "step", "admit", "clear", or a chunk's."""
        if kind not in self._compiled:
            self.warm([kind])
        return self._compiled[kind]

    def warm(self, kinds: Sequence | None = None):
        """Compiles programs, all that the engine can need if not told which, several at once."""
        if kinds is None:
            reuse = ["take", "put", "resume"] if self._layout.prefix_bytes else []
            kinds = ["step", "admit", "clear", *reuse, *chunk_kinds(self._layout, self._cfg)]
        lowered = {kind: self._lower(kind) for kind in kinds if kind not in self._compiled}
        with concurrent.futures.ThreadPoolExecutor() as pool:  # XLA leaves Python free while it works
            compiled = pool.map(lambda program: program.compile(), lowered.values())
            bar = tqdm(compiled, total=len(lowered), desc="compile", unit="program", disable=None, leave=False)
            self._compiled |= dict(zip(lowered, bar, strict=True))

    @functools.cached_property
    def block(self):
        """What a block of a prefix is, in ShapeDtypeStructs."""
        take = functools.partial(prefixes.take, chunk=self._layout.prefill_chunk)
        return jax.eval_shape(take, self._staged.cache, jax.ShapeDtypeStruct((), jnp.int32))

    def scratch_bytes(self) -> int:
        """The most that a program compiled so far needs beside its arguments and results."""
        analyses = [program.memory_analysis() for program in self._compiled.values()]
        return max(analysis.temp_size_in_bytes for analysis in analyses if analysis is not None)

    def _lower(self, kind) -> jax.stages.Lowered:
        i32, f32 = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((), jnp.float32)
        if kind == "step":
            goes_on_B = jax.ShapeDtypeStruct((self._layout.slots,), bool)
            jitted = jax.jit(step, static_argnames="cfg", donate_argnames="state")
            return jitted.lower(self._params, self._state, goes_on_B, f32, cfg=self._cfg)
        if kind == "admit":
            logits_1V = jax.ShapeDtypeStruct((1, self._cfg.vocab_size), jnp.float32)
            rows = jax.eval_shape(lambda: sampling.rows([Sampling()], sampling.row_keys(0, 1)))
            return jax.jit(admit, donate_argnames="state").lower(self._state, self._staged, logits_1V, rows, i32, i32)
        if kind == "clear":
            return jax.jit(clear, donate_argnames="staged").lower(self._staged)
        if kind == "take":
            jitted = jax.jit(prefixes.take, static_argnames="chunk")
            return jitted.lower(self._staged.cache, i32, chunk=self._layout.prefill_chunk)
        if kind == "put":
            return jax.jit(put, donate_argnames="staged").lower(self._staged, self.block, i32)
        if kind == "resume":
            return jax.jit(resume, donate_argnames="staged").lower(self._staged, i32, i32, self._staged.cache.ngram_BN)
        width, mode = kind
        tokens_1T, lengths_1 = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, width), (1,)))
        jitted = jax.jit(feed, static_argnames=("cfg", "mode"), donate_argnames="staged")
        return jitted.lower(self._params, self._staged, tokens_1T, lengths_1, cfg=self._cfg, mode=mode)


def _described(array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
