"""One training step: gradients of all micro-batches, clipping, the optimizer, the routers' bias (training.md)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from v41jax.config import Config
from v41jax.model import Params
from v41jax.training import drafts, forward, lora, packing, qat
from v41jax.training.drafts import DraftSums
from v41jax.training.forward import Sums, Teacher
from v41jax.training.settings import Kind


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a step does; static."""

    stage: Kind = "sparse"
    qat: bool = False  # rounds weights; caches are rounded as cfg.formats says
    kl_weight: float = 1.0  # times the KL of all index sources, summed
    balance_weight: float = 1e-4
    bias_step: float = 1e-3
    teacher: Teacher = "group"
    micro_batches: int = 1
    dtype: str = "float32"  # of activations
    clip: float = 1.0  # the norm of all gradients is at most this


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a checkpoint keeps."""

    params: Params  # float32 master weights
    optimizer: optax.OptState
    step: jax.Array  # i32, steps done


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """Begins a stage."""
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def train_step(
    state: TrainState, batch: dict[str, Any], *, cfg: Config, optimizer: optax.GradientTransformation, options: Options
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one step.

    Args:
      state: from `init_state` or the last step; donated.
      batch: {"tokens_BT", "document_BT"}, i32 [B, T]. NumPy rows are aligned first (`packing.align`); device arrays,
        which may be sharded over B, must be.
      cfg, optimizer, options: static; one compilation for each.
    Returns:
      The next state; metrics, f32: "loss" (nats a predicted token), "gradient_norm" before clipping, and of a backbone
      stage "kl" (a token and index source), "balance" (1 is even), "expert_load" [E], shares of all routes; of a
      "drafts" stage, whose loss is that of drafted tokens, "accepted" and "accepted_share" [n] (`drafts.DraftSums`).
    Raises:
      ValueError: a batch that the micro-batches cannot share, or whose documents are not one run of columns each.
    """
    rows = batch["tokens_BT"].shape[0]
    if rows % options.micro_batches:
        raise ValueError(f"a batch of {rows} rows cannot be split into micro_batches={options.micro_batches}")
    if isinstance(batch["document_BT"], np.ndarray):
        batch = packing.align(batch, cfg=cfg)
    elif batch["document_BT"].shape[1] % (step := packing.multiple(cfg)):
        raise ValueError(f"rows of {batch['document_BT'].shape[1]} columns are not whole multiples of {step}")
    return _step(state, batch, cfg=cfg, optimizer=optimizer, options=options)


@functools.partial(jax.jit, static_argnames=("cfg", "optimizer", "options"), donate_argnames="state")
def _step(state: TrainState, batch, *, cfg: Config, optimizer: optax.GradientTransformation, options: Options):
    gradients, sums = total_gradients(state.params, batch, cfg=cfg, options=options)
    norm = optax.tree.norm([g for g in jax.tree.leaves(gradients) if _is_float(g)])
    factor = jnp.minimum(1.0, jnp.float32(options.clip) / jnp.maximum(norm, jnp.float32(1e-30)))
    gradients = jax.tree.map(lambda g: g * factor if _is_float(g) else g, gradients)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    train = trainable(state.params, stage=options.stage)
    params = jax.tree.map(lambda on, p, u: p + u.astype(p.dtype) if on else p, train, state.params, updates)
    if options.stage in ("dense", "sparse") and not lora.is_adapted(params):
        params = balance_bias(params, sums.load_LE, step=options.bias_step)
    misplaced = jnp.any(packing.misplaced(batch["document_BT"], packing.multiple(cfg)))
    metrics = {**sums.metrics(), "gradient_norm": norm}
    metrics["loss"] = jnp.where(misplaced, jnp.nan, metrics["loss"])
    return TrainState(params, optimizer_state, state.step + 1), metrics


def total_gradients(params: Params, batch, *, cfg: Config, options: Options):
    """Differentiates the mean loss over the tokens of all micro-batches together.

    Returns:
      Gradients like `params` (integers get integer zeros), and the Sums, or DraftSums, of all micro-batches. Each
      micro-batch takes every n-th row, so that rows sharded over devices stay where they are.
    """
    micro = options.micro_batches
    predicted = jnp.sum(packing.Documents(batch["document_BT"]).predicted_BT, dtype=jnp.float32)
    tokens = jnp.sum(batch["document_BT"] >= 0, dtype=jnp.float32)
    counts = jnp.maximum(predicted, 1), jnp.maximum(tokens, 1)
    places_n = jnp.maximum(drafts.predicted(batch, cfg=cfg), 1)
    train = trainable(params, stage=options.stage)

    def weigh(params):
        params = jax.tree.map(lambda on, p: p if on else jax.lax.stop_gradient(p), train, params)
        return qat.compute_weights(params, cfg=cfg, dtype=jnp.dtype(options.dtype), weights=options.qat)

    def draft_loss(params, batch):
        sums = drafts.train_forward(weigh(params), batch, cfg=cfg)
        return jnp.mean(sums.loss_n / places_n), sums

    def loss(params, batch):
        weights = weigh(params)
        dense, teaches = options.stage in ("dense", "warmup"), options.stage != "dense"
        sums = forward.train_forward(weights, batch, cfg=cfg, dense=dense, teaches=teaches, teacher=options.teacher)
        total = jnp.float32(options.kl_weight) * jnp.sum(sums.kl_S) / counts[1]
        if options.stage != "warmup":
            total += sums.loss / counts[0] + jnp.float32(options.balance_weight) * sums.balance / counts[1]
        return total, sums

    objective = draft_loss if options.stage == "drafts" else loss

    def one(batch) -> tuple[Params, Sums | DraftSums]:
        gradients, sums = jax.grad(objective, has_aux=True, allow_int=True)(params, batch)
        return jax.tree.map(lambda g, p: g if _is_float(p) else jnp.zeros_like(p), gradients, params), sums

    if micro == 1:
        return one(batch)
    parts = jax.tree.map(lambda a: a.reshape(-1, micro, *a.shape[1:]).swapaxes(0, 1), batch)
    zeros = jax.tree.map(
        lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, jax.tree.map(lambda a: a[0], parts))
    )
    return jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, one(part)), None), zeros, parts)[0]


def trainable(params: Params, *, stage: str):
    """A tree of bools, what the optimizer may move: no integer, no router's bias; with adapters, those alone."""
    adapted = lora.is_adapted(params)

    def train(path, leaf) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        if adapted and not name.endswith(lora.TRAINED):
            return False
        if name.startswith("mtp.") != (stage == "drafts") or ".gate.bias" in name or not _is_float(leaf):
            return False
        return stage not in ("dense", "warmup") or (".attn.indexer." in name) == (stage == "warmup")

    return jax.tree_util.tree_map_with_path(train, params)


def balance_bias(params: Params, load_LE, *, step: float) -> Params:
    """Moves every router's bias by a fixed step: up for experts with fewer routes than the mean, down with more."""
    move_LE = jnp.float32(step) * jnp.sign(load_LE.mean(1, keepdims=True) - load_LE)
    layers = []
    for layer, move_E in zip(params["layers"], move_LE, strict=True):
        gate = {**layer["ffn"]["gate"], "bias": layer["ffn"]["gate"]["bias"] + move_E}
        layers.append({**layer, "ffn": {**layer["ffn"], "gate": gate}})
    return {**params, "layers": layers}


def _is_float(leaf) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.floating)
