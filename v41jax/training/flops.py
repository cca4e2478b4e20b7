"""What a token of training costs in operations the model itself asks for: from tokens a second to utilisation."""

import math

from v41jax import model, tree
from v41jax.config import Config, Role, layer_plan

BACKWARD = 3  # forward once, backward twice; what rematerialisation and the teacher repeat does not count


def forward_flops_per_token(cfg: Config, *, length: int) -> float:
    """Counts floating-point operations of one token's forward pass, the mean over a document of `length` tokens.

    Two for each weight a token multiplies by (of experts, only the chosen), and for attention and index scores two for
    each product. Look-ups, norms, softmax and hyper-connection sums are left out.
    """
    weights = 0.0
    for path, spec in tree.walk(model.specs(cfg)):
        name = path.split(".")
        if name[0] in ("mtp", "embed", "token_map") or path.endswith("engram.embed") or len(spec.shape) < 2:
            continue
        share = cfg.num_experts_per_tok / spec.shape[0] if spec.per_expert else 1.0
        if path.endswith(("q_weight", "k_weight")):
            continue
        if path.endswith("indexer.wk"):
            share = 1 / cfg.compress_ratios[int(name[1])]  # once an entry
        weights += share * math.prod(spec.shape)
    products = sum(_layer_products(cfg, layer, length) for layer in layer_plan(cfg))
    return 2 * (weights + products)


def training_flops_per_token(cfg: Config, *, length: int) -> float:
    """Counts a token's forward and backward pass; see `forward_flops_per_token`."""
    return BACKWARD * forward_flops_per_token(cfg, length=length)


def utilization(tokens_per_second: float, cfg: Config, *, length: int, peak_flops: float) -> float:
    """The share of `peak_flops` a second, of all devices together, that training at this rate uses (MFU)."""
    return tokens_per_second * training_flops_per_token(cfg, length=length) / peak_flops


def _layer_products(cfg: Config, layer, length: int) -> float:
    """Multiplications of queries with keys and of weights with values, and of index queries with keys."""
    rows = _mean_least(length, 1, cfg.sliding_window)
    scored = 0.0
    if layer.role is not Role.WINDOW:
        rows += _mean_least(length, layer.ratio, cfg.index_topk)
    if layer.role in (Role.FULL, Role.REINDEX):
        scored = _mean_least(length, layer.ratio, cfg.pool_size if layer.scores_candidates else length)
    attention = 2 * rows * cfg.num_attention_heads * cfg.head_dim
    return attention + scored * cfg.index_n_heads * cfg.index_head_dim


def _mean_least(length: int, ratio: int, most: int) -> float:
    """The mean over positions t of min((t + 1) // ratio, most)."""
    return sum(min((t + 1) // ratio, most) for t in range(length)) / length
