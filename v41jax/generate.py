"""Texts continued in one go: an engine with a slot for each prompt, made for them and gone with them."""

import dataclasses
import time
from collections.abc import Iterator, Sequence

from v41jax import memory, slots
from v41jax.cache import bytes_per_token, window_bytes
from v41jax.config import Config
from v41jax.engine import Engine
from v41jax.model import Params
from v41jax.slots import Layout
from v41jax.tickets import Request, Update


@dataclasses.dataclass(kw_only=True)
class Stats:
    """What a run cost: seconds, tokens and bytes, filled in by `stream`."""

    compile_seconds: float = 0.0
    prefill_seconds: float = 0.0  # until every prompt has its first token; rows that have theirs decode meanwhile
    prefill_tokens: int = 0  # of all prompts
    decode_seconds: float = 0.0  # from then on
    decode_steps: int = 0
    decode_tokens: int = 0
    capacity: int = 0  # tokens a row may hold
    cache_bytes: int = 0  # of all slots and of the row that takes prompts
    window_bytes: int = 0  # of one row's rings, at any length
    token_bytes: float = 0  # one more token of capacity


def layout_for(requests: Sequence[Request], *, cfg: Config, prefill_chunk: int = 512, **drafting) -> Layout:
    """Fits an engine to requests: a slot for each, and the room that the longest needs.

    Args:
      requests: one or more.
      cfg: the model.
      prefill_chunk, drafting: see `Layout`.
    Raises:
      ValueError: one of them cannot be served by this model at all.
    """
    if not requests:
        raise ValueError("there is no prompt; give one or more")
    needed = max(len(request.prompt) + request.max_new_tokens for request in requests)
    layout = Layout(
        slots=len(requests), capacity=cfg.max_position_embeddings, prefill_chunk=prefill_chunk, **drafting
    )  # fmt: skip
    layout.check(cfg)
    for number, request in enumerate(requests):
        try:
            request.check(cfg, layout)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    return dataclasses.replace(layout, capacity=needed)


def stream(
    params: Params, requests: Sequence[Request], *, cfg: Config, layout: Layout, stats: Stats | None = None
) -> Iterator[tuple[int, Update]]:
    """Continues prompts side by side.

    Args:
      params, cfg: the model.
      requests: one for each slot of the layout, or more.
      layout: from `layout_for`.
      stats: filled in as the run goes on.
    Yields:
      the number of a request and what has become of it; a step's updates come together, by rising number of the slot.
    """
    stats = stats if stats is not None else Stats()
    started = time.perf_counter()
    engine = Engine(params, cfg, layout)
    plans = [slots.plan_chunks(r.prompt, cfg=cfg, prefill_chunk=layout.prefill_chunk) for r in requests]
    kinds = dict.fromkeys(chunk.kind for plan in plans for chunk in plan)
    engine.warm(["step", "admit", "clear", *kinds])
    stats.capacity, stats.cache_bytes = layout.capacity, memory.cache_bytes(cfg, layout)
    stats.window_bytes, stats.token_bytes = window_bytes(cfg), bytes_per_token(cfg)
    stats.compile_seconds = time.perf_counter() - started

    started = time.perf_counter()
    number_of = {engine.submit(request): number for number, request in enumerate(requests)}
    silent, steps = set(number_of), 0
    while not engine.idle:
        updates = engine.turn()
        now, count = time.perf_counter() - started, sum(len(update.tokens) for update in updates)
        if silent:
            silent -= {update.ticket for update in updates}
            stats.prefill_seconds, stats.prefill_tokens, steps = now, engine.counts.prompt_tokens, engine.counts.steps
        else:
            stats.decode_seconds, stats.decode_steps = now - stats.prefill_seconds, engine.counts.steps - steps
            stats.decode_tokens += count
        yield from ((number_of[update.ticket], update) for update in updates)
