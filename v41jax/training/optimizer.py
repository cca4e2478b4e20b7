"""Which parameter is trained by what: Muon for matrices, AdamW for the rest, from optax (training.md).

The rule is the one of the DeepSeek-V4 report: embedding, prediction head, norms, biases and scales (attention sinks and
those of hyper-connections too) by AdamW, every other parameter by Muon. Engram tables have AdamW at five times the rate
and no weight decay, since a row no token hashed to must not move. Weight decay is for matrices and embeddings.
Low-rank adapters have AdamW, without decay.
Muon takes each matrix on its own: a head of a query projection, an output group, an expert, an Engram stream's key.
"""

import collections
import math
from collections.abc import Hashable
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from v41jax.config import Config
from v41jax.training.lora import TRAINED
from v41jax.training.settings import Stage
from v41jax.training.step import trainable

Rule = Literal["muon", "embedding", "vector", "table"]

MOMENTUM = 0.95
UPDATE_RMS = 0.18
BETAS, EPS = (0.9, 0.95), 1e-20
TABLE_RATE = 5.0  # of Engram tables, times the learning rate
FLOOR = 0.1  # of the learning rate, at the end of the cosine
# Eight steps that bring singular values near 1 and two that settle them there (DeepSeek-V4 report).
NEWTON_SCHULZ = ((3.4445, -4.7750, 2.0315),) * 8 + ((2.0, -1.5, 0.5),) * 2

EMBEDDINGS = ("embed", "head", "markov_head.embed", "markov_head.head")
MATRIX = optax.contrib.MuonDimensionNumbers(reduction_axis=2, output_axis=1)  # of [matrices, out, in]


def rule(name: str, shape: tuple[int, ...]) -> Rule:
    """Chooses what trains a parameter, by the dotted path of its spec and its shape."""
    *_, owner, last = ("", *name.split("."))
    if last in TRAINED:
        return "vector"
    if owner == "engram":
        return "table" if last == "embed" else "muon" if last == "wkv" else "vector"
    if name in EMBEDDINGS or f"{owner}.{last}" in EMBEDDINGS:
        return "embedding"
    return "muon" if len(shape) > 1 and min(shape) > 1 else "vector"


def matrices(name: str, shape: tuple[int, ...], *, cfg: Config) -> tuple[int, int, int]:
    """Splits a weight [out, in], or [experts, out, in], into the matrices it consists of: (matrices, out, in)."""
    if len(shape) == 3:
        return shape
    parts = {
        "attn.wq_b": cfg.num_attention_heads,
        "indexer.wq_b": cfg.index_n_heads,
        "attn.wo_a": cfg.o_groups,
        "engram.wkv": cfg.hc_mult + 1,
    }
    count = parts.get(".".join(name.split(".")[-2:]), 1)
    return count, shape[0] // count, shape[1]


def schedule(stage: Stage) -> optax.Schedule:
    """The learning rate by step of the stage: linear from 0, constant, cosine to a tenth, constant."""
    peak = stage.learning_rate
    constant_steps = stage.steps - stage.warmup_steps - stage.decay_steps - stage.final_steps
    parts = [
        (stage.warmup_steps, lambda steps: optax.linear_schedule(0.0, peak, steps)),
        (constant_steps, lambda _: optax.constant_schedule(peak)),
        (stage.decay_steps, lambda steps: optax.cosine_decay_schedule(peak, steps, alpha=FLOOR)),
        (stage.final_steps, lambda _: optax.constant_schedule(FLOOR * peak)),
    ]
    parts = [(steps, make(steps)) for steps, make in parts if steps]
    ends = [sum(steps for steps, _ in parts[:number]) for number in range(1, len(parts))]
    return optax.join_schedules([part for _, part in parts], ends)


def path_name(path) -> str:
    """The dotted name of a leaf, as `tree.walk` has it."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def labels(params, *, kind: str):
    """A tree like `params` with each leaf's Rule, or "fixed" for what a stage of this kind does not train."""

    def label(path, leaf, trains: bool) -> str:
        return rule(path_name(path), leaf.shape) if trains else "fixed"

    return jax.tree_util.tree_map_with_path(label, params, trainable(params, stage=kind))


def make_optimizer(stage: Stage, params, *, cfg: Config, weight_decay: float) -> optax.GradientTransformation:
    """Makes the optimizer of a stage.

    Args:
      stage: its learning rate and what it trains.
      params: the master weights (or ShapeDtypeStructs), plain arrays in the nesting of `model.specs`.
      cfg: static.
      weight_decay: times the learning rate, off matrices and embeddings each step.
    Returns:
      An optax transformation; what `labels` calls "fixed" gets updates of exactly 0 and has no state.
    """
    rate = schedule(stage)

    def adamw(decay: float, factor: float = 1.0):
        b1, b2 = BETAS
        return optax.adamw(lambda step: factor * rate(step), b1=b1, b2=b2, eps=EPS, weight_decay=decay)

    rules: dict[Hashable, optax.GradientTransformation] = {
        "muon": _muon(rate, weight_decay, cfg),
        "embedding": adamw(weight_decay),
        "vector": adamw(0.0),
        "table": adamw(0.0, TABLE_RATE),
        "fixed": optax.set_to_zero(),
    }
    inner = optax.partition(rules, labels(params, kind=stage.kind))

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to the power of its int32 step count
            return inner.update(updates, state, params)

    return optax.GradientTransformation(inner.init, update)


def _muon(rate: optax.Schedule, weight_decay: float, cfg: Config) -> optax.GradientTransformation:
    """Muon on the matrices that weights consist of.

    Matrices of one shape are stacked, of all layers: tens of programs of batched products in place of hundreds.
    """
    inner = optax.chain(
        optax.contrib.scale_by_muon(
            ns_coeffs=NEWTON_SCHULZ,
            ns_steps=len(NEWTON_SCHULZ),
            beta=MOMENTUM,
            nesterov=True,
            weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: MATRIX, updates),
        ),
        optax.stateless(lambda updates, _: jax.tree.map(_to_rms, updates)),
    )

    def update(updates, state, params=None):
        del params
        stacked, state = inner.update(_stack(updates, cfg), state)
        return _unstack(stacked, updates, cfg), state

    return optax.chain(
        optax.GradientTransformation(lambda params: inner.init(_stack(params, cfg)), update),
        optax.add_decayed_weights(weight_decay),
        optax.scale_by_learning_rate(rate),
    )


def _stack(weights, cfg: Config) -> dict[str, jax.Array]:
    """Concatenates the matrices of all weights by shape: {"OUTxIN": [matrices, OUT, IN]}."""
    groups = collections.defaultdict(list)
    for path, leaf in jax.tree_util.tree_leaves_with_path(weights):
        shape = matrices(path_name(path), leaf.shape, cfg=cfg)
        groups[f"{shape[1]}x{shape[2]}"].append(leaf.reshape(shape))
    return {name: jnp.concatenate(parts) for name, parts in groups.items()}


def _unstack(groups, like, cfg: Config):
    """Undoes `_stack` for weights of the shapes of `like`."""
    used = collections.Counter()

    def take(path, leaf):
        count, rows, columns = matrices(path_name(path), leaf.shape, cfg=cfg)
        name = f"{rows}x{columns}"
        used[name] += count
        return groups[name][used[name] - count : used[name]].reshape(leaf.shape)

    return jax.tree_util.tree_map_with_path(take, like)


def _to_rms(update):
    """Scales an orthogonal [matrices, out, in], whose RMS is max(out, in)^-0.5, to an RMS of UPDATE_RMS."""
    return update * jnp.float32(UPDATE_RMS * math.sqrt(max(update.shape[-2:])))
