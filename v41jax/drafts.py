"""DSpark drafts: small stages behind the backbone guess a block of tokens in one pass (architecture section 9).

What the backbone saw of a token becomes one window row in every stage (`seed`); `draft` reads those rings and writes
nothing. So a rejected draft has left no trace, and a token that was fed to verify it leaves none if its row is not
seeded: cut the span of `main_hidden` to the accepted tokens.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.gather_attention import gather_attention
from v41jax import attention, mhc, model, quant
from v41jax.cache import Span, empty_window, window_index, write_window
from v41jax.config import Config, layer_plan
from v41jax.layers import project, rms_norm
from v41jax.model import Flow, LayerRecord, Params
from v41jax.quant import Packed
from v41jax.rope import layer_frequencies, rotate, turn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftCache:
    """What the draft stages keep of a batch of sequences. Made by `init_draft_cache`; `seed` returns the next."""

    windows: tuple[Packed, ...]  # one per stage, [B, W, H]; position p is in slot p mod W
    length_B: jax.Array  # i32, tokens seen


class Rows(NamedTuple):
    """Window rows of one stage [B, P, H], and the floats they were rounded from (None: they get no gradient)."""

    packed: Packed
    latent: jax.Array | None


class Drafts(NamedTuple):
    """A block of n drafted tokens, the first to follow the token it was drafted from."""

    token_BT: jax.Array  # i32 [B, n]
    logits_BTV: jax.Array  # f32 [B, n, V], the Markov head's part included
    confidence_BT: jax.Array  # f32 [B, n], a logit


def init_draft_cache(cfg: Config, batch: int) -> DraftCache:
    """Allocates empty rings.

    Raises:
      ValueError: a batch under 1, a model without draft stages.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}; a draft cache holds 1 sequence or more")
    if not cfg.num_nextn_predict_layers:
        raise ValueError("num_nextn_predict_layers=0: the model has no draft stages; 1 or more can draft")
    stages = range(cfg.num_nextn_predict_layers)
    return DraftCache(tuple(empty_window(cfg, batch) for _ in stages), jnp.zeros((batch,), jnp.int32))


# ---- what the backbone has seen


def main_hidden(params: Params, records: Sequence[LayerRecord], *, cfg: Config):
    """Gathers what enters the target layers, n-gram memory included, averaged over the streams.

    Args:
      params: of the model.
      records: from `model.run`, in any mode that runs the target layers.
      cfg: static.
    Returns:
      [B, T, targets x D] in the streams' dtype, and the Span of those tokens: the call's last, `sliding_window` of them
      or all there are, and more where the mode kept more.
    Raises:
      ValueError: the call stopped before the last target layer.
    Source: architecture section 9.
    """
    targets = cfg.dspark_target_layer_ids
    if len(records) < max(targets):
        raise ValueError(
            f"{len(records)} layers ran, but drafts read what enters layers {list(targets)}; a call in mode 'encoder'"
            " cannot seed them, the prompt tokens that must follow it can"
        )
    span, flows = records[max(targets) - 1].span, []
    for target in targets:
        before = records[target - 1]
        _, crop = before.span.last(span.width)
        flows.append(crop(before.flow))
    return enter_targets(params, flows, cfg=cfg), span


def enter_targets(params: Params, flows: Sequence[Flow], *, cfg: Config):
    """Joins what enters the target layers, [B, T, targets x D], from the Flow before each of them."""
    plan, parts = layer_plan(cfg), []
    for target, flow in zip(cfg.dspark_target_layer_ids, flows, strict=True):
        streams, _ = model.enter(params["layers"][target], flow, layer=plan[target], cfg=cfg)
        parts.append(jnp.mean(streams.astype(jnp.float32), axis=2).astype(streams.dtype))
    return jnp.concatenate(parts, axis=-1)


def main_rows(params: Params, hidden_BTM, position_BT, *, cfg: Config) -> list[Rows]:
    """Makes every stage's window rows of tokens at i32 positions from their `main_hidden`."""
    first = params["mtp"][0]
    main = project(hidden_BTM, first["main_proj"], activation=cfg.formats.activation)
    main = rms_norm(main, first["main_norm"], cfg.rms_norm_eps)
    return [_rows(weights["attn"], main, position_BT, cfg=cfg) for weights in params["mtp"]]


def seed(params: Params, cache: DraftCache, hidden_BTM, span: Span, *, cfg: Config) -> DraftCache:
    """Appends tokens of the backbone to the rings.

    Args:
      params: of the model.
      cache: from `init_draft_cache` or the last `seed`; not changed.
      hidden_BTM, span: from `main_hidden`. With the span's lengths cut to the tokens that were accepted, the cache
        becomes to the bit what it is when the others were never seen.
      cfg: static.
    Returns:
      The next cache.
    """
    span, crop = span.last(cfg.sliding_window)
    rows = main_rows(params, crop(hidden_BTM), span.position_BT, cfg=cfg)
    windows = [write_window(window, row.packed, span) for window, row in zip(cache.windows, rows, strict=True)]
    return DraftCache(tuple(windows), span.end_B)


def _rows(weights, x_BTD, position_BT, *, cfg: Config) -> Rows:
    frequency = layer_frequencies(cfg, compressed=False)
    latent = attention.window_latent(weights, x_BTD, cfg=cfg)
    rotation = turn(position_BT, frequency)
    packed = quant.rotate_quantize(jax.lax.stop_gradient(latent), rotation, cfg.formats.window)
    return Rows(packed, rotate(latent, position_BT, frequency))


# ---- drafting


def greedy(logits_BV, step: int):
    """Takes the best token, the lowest id on ties: i32 [B]."""
    del step
    return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)


def draft(
    params: Params, cache: DraftCache, token_B, *, cfg: Config, sample: Callable[..., jax.Array] = greedy
) -> Drafts:
    """Drafts `dspark_block_size` tokens behind the newest one.

    Args:
      params: of the model.
      cache: seeded with all tokens before `token_B`; not changed.
      token_B: i32, the token the backbone chose last and has not seen.
      cfg: static.
      sample: static; (f32 logits [B, V], place in the block) -> i32 [B], the token drafted there.
    Raises:
      ValueError: another number of tokens than the cache has rows.
    Source: architecture section 9.
    """
    if token_B.shape != cache.length_B.shape:
        raise ValueError(f"token_B has shape {token_B.shape}; this draft cache needs {cache.length_B.shape}")
    newest = Span(cache.length_B - 1, jnp.ones_like(cache.length_B), 1)
    index_B1W = window_index(cfg.sliding_window, newest, cache.length_B, jnp.zeros_like(cache.length_B), in_ring=True)
    context = [Rows(window, None) for window in cache.windows]
    x_BTD = run_stages(params, token_B[:, None], context, index_B1W, cache.length_B[:, None], cfg=cfg)
    first_BTV, last = own_logits(params, x_BTD, cfg=cfg), params["mtp"][-1]
    parts = []
    for i in range(cfg.dspark_block_size):
        logits_BV, confidence_B = follow(last, first_BTV[:, i], x_BTD[:, i], token_B)
        token_B = sample(logits_BV, i)
        parts.append((token_B, logits_BV, confidence_B))
    return Drafts(*(jnp.stack(part, axis=1) for part in zip(*parts, strict=True)))


def run_stages(params: Params, token_BA, context: Sequence[Rows], index_BAW, position_BA, *, cfg: Config):
    """Runs the stages on A blocks of n = `dspark_block_size` positions that know nothing of each other.

    Args:
      params: of the model.
      token_BA: i32, the token at the head of each block; the others are noise.
      context: each stage's window rows, P of them.
      index_BAW: i32 rows in 0..P-1 that a block sees besides all positions of its own; -1 for none.
      position_BA: i32, of the head.
      cfg: static.
    Returns:
      [B, A n, D], the streams collapsed by the last stage's mix and not normalised.
    """
    n = cfg.dspark_block_size
    B, A = token_BA.shape
    place = jnp.arange(n, dtype=jnp.int32)
    tokens_BT = jnp.where(place == 0, token_BA[..., None], jnp.int32(cfg.dspark_noise_token_id)).reshape(B, A * n)
    position_BT = (position_BA[..., None] + place).reshape(B, A * n)
    own_An = context[0].packed.codes.shape[1] + jnp.arange(A * n, dtype=jnp.int32).reshape(A, n)
    index_BAK = jnp.concatenate([index_BAW, jnp.broadcast_to(own_An, (B, A, n))], axis=2)
    index_BTK = jnp.repeat(index_BAK, n, axis=1)
    flow = Flow(*model.look_up(params, tokens_BT, cfg=cfg), None, ())
    for weights, rows in zip(params["mtp"], context, strict=True):
        with jax.named_scope("draft"):
            flow = _stage(weights, flow, rows, index_BTK, position_BT, cfg=cfg)
    return mhc.collapse(flow.pre_BTZ, flow.streams_BTZD)


def _stage(weights, flow: Flow, context: Rows, index_BTK, position_BT, *, cfg: Config) -> Flow:
    streams, frequency = flow.streams_BTZD, layer_frequencies(cfg, compressed=False)
    x = rms_norm(mhc.collapse(flow.pre_BTZ, streams), weights["attn_norm"], cfg.rms_norm_eps)
    mix = mhc.mixes(weights, "attn", streams, cfg=cfg)
    latent = attention.query_latent(weights["attn"], x, cfg=cfg)
    query = attention.queries(weights["attn"], latent, position_BT, frequency=frequency, cfg=cfg)
    own = _rows(weights["attn"], x, position_BT, cfg=cfg)
    if context.latent is None:
        own = own._replace(latent=None)
    rows = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), context, own)
    out = gather_attention(
        query, weights["attn"]["attn_sink"], (rows.packed.codes, rows.packed.scales), index_BTK,
        latents=(rows.latent, None), scale=cfg.head_dim**-0.5, window_format=rows.packed.format,
    )  # fmt: skip
    y = attention.output(weights["attn"], out, position_BT, frequency=frequency, cfg=cfg)
    flow = Flow(mhc.expand(mix, y, streams), mix.pre, None, ())
    return model.run_moe(weights, flow, top=cfg.dspark_num_experts_per_tok, cfg=cfg)[0]


def own_logits(params: Params, x_BTD, *, cfg: Config):
    """Projects what `run_stages` returns to f32 logits [B, T, V], before the Markov head adds its part."""
    x = rms_norm(x_BTD, params["mtp"][-1]["norm"], cfg.rms_norm_eps)
    return project(x, params["head"], dtype=jnp.float32)


def follow(last, logits_V, x_D, token):
    """Adds what the token before each position says of it.

    Args:
      last: weights of the last stage.
      logits_V: f32 [..., V] from `own_logits`.
      x_D: [..., D] from `run_stages`.
      token: i32 [...], at the position before.
    Returns:
      f32 logits [..., V] and confidence [...].
    """
    memory = last["markov_head"]["embed"][token]
    logits_V = logits_V + project(memory, last["markov_head"]["head"], dtype=jnp.float32)
    both = jnp.concatenate([x_D.astype(jnp.float32), memory.astype(jnp.float32)], axis=-1)
    return logits_V, project(both, last["confidence_head"]["proj"], dtype=jnp.float32)[..., 0]
