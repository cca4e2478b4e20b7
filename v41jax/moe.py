"""Mixture of experts: router, sorted grouped dispatch, shared expert (architecture section 7).

Each token's choices are sorted by expert and laid out in tiles of rows that share one. A tile multiplies by the packed
weights of its expert; the work follows the number of rows, and no expert is touched that no tile needs.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from v41jax import quant
from v41jax.config import Config
from v41jax.layers import project, tile_project
from v41jax.quant import Packed
from v41jax.tree import ArraySpec, Specs

LARGEST_TILE = 128  # rows that share one dequantised expert


class Routes(NamedTuple):
    """expert: i32 [..., n], best first. weight: f32 [..., n]."""

    expert: jax.Array
    weight: jax.Array


def specs(cfg: Config, experts: int) -> Specs:
    """Describes router, `experts` routed experts and the shared one. The router is never quantised."""
    D, F = cfg.hidden_size, cfg.moe_intermediate_size

    def routed(shape, axes):
        axes = ("experts", *axes)
        return ArraySpec(shape=(experts, *shape), axes=axes, format=cfg.expert_format, per_expert=True)

    def shared(shape, axes):
        return ArraySpec(shape=shape, axes=axes, format=cfg.dense_format)

    def bias():
        return ArraySpec(shape=(experts,), axes=("experts",), init="zeros", dtype="float32", suffix="")

    shapes = {"w1": ((F, D), ("mlp", "embed")), "w2": ((D, F), ("embed", "mlp")), "w3": ((F, D), ("mlp", "embed"))}
    return {
        "gate": {
            "weight": ArraySpec(shape=(experts, D), axes=("experts", "embed"), suffix=""),
            "bias": bias(),
            **({"bias_vl": bias()} if cfg.vision else {}),  # for image tokens; this is the text model
        },
        "experts": {name: routed(*shape) for name, shape in shapes.items()},
        "shared_experts": {name: shared(*shape) for name, shape in shapes.items()},
    }


def route(params, x_TD, *, top: int, cfg: Config) -> Routes:
    """Chooses `top` experts a token by score plus bias, the lower on ties; weights are the scores alone, in float32.

    Source: reference `Gate`.
    """
    return choose(router_logits(params, x_TD, cfg=cfg), params["bias"], top=top, cfg=cfg)


def router_logits(params, x_TD, *, cfg: Config):
    """Projects to f32 [..., E], divided by the temperature."""
    return project(x_TD, params["weight"], dtype=jnp.float32) / jnp.float32(cfg.gate_temp)


def choose(logits_TE, bias_E, *, top: int, cfg: Config) -> Routes:
    """Scores router logits and picks; see `route`."""
    scores = score(logits_TE, cfg=cfg)
    _, expert = lax.top_k(scores + bias_E, top)
    weight = jnp.take_along_axis(scores, expert, axis=-1)
    if top > 1 and cfg.norm_topk_prob:
        weight = weight / (weight.sum(-1, keepdims=True) + jnp.float32(1e-20))
    return Routes(expert.astype(jnp.int32), weight * jnp.float32(cfg.routed_scaling_factor))


def score(logits_TE, *, cfg: Config):
    """Turns router logits into the scores of experts, f32, 0 or more."""
    if cfg.scoring_func == "sqrtsoftplus":
        # Far below 0 softplus is exp, and underflows where the root's gradient would be NaN: take exp's root there.
        low = logits_TE < -30
        return jnp.where(low, jnp.exp(logits_TE / 2), jnp.sqrt(jax.nn.softplus(jnp.where(low, -30.0, logits_TE))))
    if cfg.scoring_func == "sigmoid":
        return jax.nn.sigmoid(logits_TE)
    return jax.nn.softmax(logits_TE, axis=-1)


def moe(params, x_BTD, *, top: int, cfg: Config):
    """Applies the routed and the shared experts.

    Returns:
      [B, T, D] in x's dtype, summed in float32 in the order of each token's routes; and the Routes [B, T, top].
    Source: report 2.1; reference `MoE`.
    """
    x_TD = x_BTD.reshape(-1, x_BTD.shape[-1])
    routes = route(params["gate"], x_TD, top=top, cfg=cfg)
    routed = _routed(params["experts"], x_TD, routes, cfg=cfg)
    shared = _feed_forward(params["shared_experts"], x_TD, None, None, cfg=cfg)
    y = (routed + shared).astype(x_BTD.dtype).reshape(x_BTD.shape)
    return y, Routes(*(r.reshape(*x_BTD.shape[:2], top) for r in routes))


class Tiles(NamedTuple):
    """Where rows stand once sorted by expert and padded to whole tiles."""

    expert_M: jax.Array  # i32, the expert of each tile; -1 past the last used one
    source_S: jax.Array  # i32 [M * rows], the row in each slot; the number of rows where a slot is empty
    slot_N: jax.Array  # i32, the slot of each row


def tile_rows(rows: int, experts: int) -> int:
    """Picks rows a tile: one while experts outnumber rows, then about as many as an expert gets."""
    return min(LARGEST_TILE, 1 << max(0, -(-rows // experts) - 1).bit_length())


def sort_to_tiles(expert_N, *, experts: int, tile: int) -> Tiles:
    """Sorts rows by expert into tiles of one expert each: at most min(N, N // tile + experts) tiles."""
    N = expert_N.size
    tiles = min(N, N // tile + experts)
    order_N = jnp.argsort(expert_N, stable=True).astype(jnp.int32)
    count_E = jnp.sum(expert_N[:, None] == jnp.arange(experts, dtype=jnp.int32), axis=0, dtype=jnp.int32)
    tiles_E = lax.div(count_E + (tile - 1), jnp.int32(tile))
    end_E = jnp.cumsum(tiles_E, dtype=jnp.int32)
    first_row_E = jnp.cumsum(count_E, dtype=jnp.int32) - count_E
    sorted_N = expert_N[order_N]
    rank_N = jnp.arange(N, dtype=jnp.int32) - first_row_E[sorted_N]
    slot_sorted_N = (end_E - tiles_E)[sorted_N] * tile + rank_N
    expert_M = jnp.sum(end_E <= jnp.arange(tiles, dtype=jnp.int32)[:, None], axis=1, dtype=jnp.int32)
    return Tiles(
        expert_M=jnp.where(expert_M < experts, expert_M, -1),
        source_S=jnp.full((tiles * tile,), N, jnp.int32).at[slot_sorted_N].set(order_N),
        slot_N=jnp.zeros((N,), jnp.int32).at[order_N].set(slot_sorted_N),
    )


def _routed(params, x_TD, routes: Routes, *, cfg: Config):
    tokens, top = routes.expert.shape
    experts = jax.tree.leaves(params)[0].shape[0]
    tile = tile_rows(tokens * top, experts)
    tiles = sort_to_tiles(routes.expert.reshape(-1), experts=experts, tile=tile)
    x_SD = _to_slots(x_TD, tiles, top)
    weight_S = _to_slots(routes.weight.reshape(-1), tiles, 1)
    y_SD = _feed_forward(params, x_SD, weight_S, tiles.expert_M, cfg=cfg)
    return _from_slots(y_SD, tiles).reshape(tokens, top, -1).sum(1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _to_slots(x_T, tiles: Tiles, top: int):
    """Puts rows, each `top` times, where they stand sorted; 0 in empty slots. Its gradient gathers, it adds nowhere."""
    return x_T.at[lax.div(tiles.source_S, jnp.int32(top))].get(mode="fill", fill_value=0)


def _to_slots_backward(top: int, tiles: Tiles, cotangent_S):
    rows = cotangent_S[tiles.slot_N]
    return rows.reshape(-1, top, *rows.shape[1:]).sum(1, dtype=jnp.float32).astype(rows.dtype), None


_to_slots.defvjp(lambda x_T, tiles, top: (_to_slots(x_T, tiles, top), tiles), _to_slots_backward)


@jax.custom_vjp
def _from_slots(y_S, tiles: Tiles):
    """Takes the sorted rows back in the order of the routes; its gradient gathers too."""
    return y_S[tiles.slot_N]


def _from_slots_backward(tiles: Tiles, cotangent_N):
    return cotangent_N.at[tiles.source_S].get(mode="fill", fill_value=0), None


_from_slots.defvjp(lambda y_S, tiles: (_from_slots(y_S, tiles), tiles), _from_slots_backward)


def _feed_forward(params, x_SD, weight_S, expert_M, *, cfg: Config):
    """SwiGLU with clipped gate and up projections; `weight_S` scales each row before w2. Returns f32 [S, D].

    Rows stand in M tiles of equal size, tile m for expert `expert_M[m]` of the stacked weights; None: there is one.
    """
    act = cfg.formats.activation

    def multiply(x, weight):
        if expert_M is None:
            return project(x, weight, activation=act, dtype=jnp.float32)
        if isinstance(weight, Packed):
            x = quant.fake_quantize(x, act)
        else:
            weight = Packed(weight, jnp.zeros((weight.shape[0], 0), jnp.uint8), None)
        y = tile_project(x.reshape(expert_M.size, -1, x.shape[-1]), weight, expert_M)
        return y.reshape(x.shape[0], -1)

    gate, up = multiply(x_SD, params["w1"]), multiply(x_SD, params["w3"])
    if cfg.swiglu_limit > 0:
        limit = jnp.float32(cfg.swiglu_limit)
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    hidden = jax.nn.silu(gate) * up
    hidden = hidden if weight_S is None else hidden * weight_S[:, None]
    return multiply(hidden.astype(x_SD.dtype), params["w2"])
