"""The architecture as data: `Config` is config.json, `layer_plan` turns its lists into layer roles.

Field names and defaults are those of the released config.json (`text_config`), so `Config()` is V4.1-Flash.
A config is static: hashable, validated when made, and never holds an array, a mesh or a runtime switch.
"""

import dataclasses
import enum
import math
from typing import Literal

import jax

Mode = Literal["exact", "full", "replay"]  # which tokens enter the decoder layers in a prefill (prefill.md)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """YaRN, applied in layers with a compressed branch only; there is no m-scale (architecture section 3)."""

    factor: float = 16.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 65536


@dataclasses.dataclass(frozen=True, kw_only=True)
class Formats:
    """Number formats by use; each is a name in `quant.FORMATS`, or None for plain floats (section 4).

    The caches of the released model are packed. None for `window`, `entry` and `index` exists so that tests can tell
    a rounding that flipped from a fault; `activation` turns on the reference's W8A8 and W4A8 matmuls.
    """

    window: str | None = "fp8_e8m0_32"  # window KV, [head_dim] a row
    entry: str | None = "fp4_e4m3_16"  # main KV, [head_dim] an entry
    index: str | None = "fp4_e8m0_32"  # index keys and index queries, [index_head_dim]
    activation: str | None = None  # activations that enter an FP8 or FP4 weight: None or "fp8_e8m0_32"


UNQUANTIZED = Formats(window=None, entry=None, index=None)


class Role(enum.Enum):
    """What a layer does besides its sliding window (section 1)."""

    WINDOW = "window"  # nothing
    FULL = "full"  # compresses tokens to entries, scores and selects
    REINDEX = "reindex"  # scores and selects in entries of an earlier layer
    REUSE = "reuse"  # takes entries and selection from earlier layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """One backbone layer, derived from the config's lists."""

    layer: int
    role: Role
    ratio: int  # tokens an entry stands for; 0 in a window-only layer
    pool: int | None  # which of `Cache.pools` it reads: an index into `kv_source_layer_ids`
    builds_candidates: bool  # it is the candidate source
    scores_candidates: bool  # its indexer sees the candidate pool only
    engram: int | None  # which engram table it owns: an index into `engram_layer_ids`
    decoder: bool  # at or after the last KV source: only a prompt's tail has to enter (prefill.md)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Sizes, schedules and constants of one model; see the module docstring."""

    vocab_size: int = 129280
    hidden_size: int = 5120
    num_hidden_layers: int = 40
    rms_norm_eps: float = 1e-20
    max_position_embeddings: int = 1048576
    bos_token_id: int | None = 0
    eos_token_id: int | None = 1
    pad_token_id: int | None = 2
    # attention
    num_attention_heads: int = 64
    head_dim: int = 512
    qk_rope_head_dim: int = 64
    q_lora_rank: int = 1280
    o_groups: int = 8
    o_lora_rank: int = 1024
    sliding_window: int = 128
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling | None = RopeScaling()
    # layer schedule
    compress_ratios: tuple[int, ...] = (0, 0) + (2,) * 18 + (1,) * 20 + (0,) * 3
    kv_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20)
    index_source_layer_ids: tuple[int, ...] = (2, 8, 14, 20, 24, 28, 32, 36)
    # lightning indexer and hierarchical sparse indexer; sizes count entries, never tokens
    index_n_heads: int = 32
    index_head_dim: int = 128
    index_topk: int = 512
    candidate_source_layer_id: int | None = 20
    candidate_topk_blocks: int = 2048
    candidate_block_size: int = 8
    # mixture of experts
    n_routed_experts: int = 384
    num_experts_per_tok: int = 6
    moe_intermediate_size: int = 2304
    scoring_func: str = "sqrtsoftplus"
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.5
    swiglu_limit: float = 10.0
    gate_temp: float = 1.0
    # single-pass mHC
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    # engram
    engram_layer_ids: tuple[int, ...] = (1, 14)
    engram_num_embeddings: tuple[int, ...] = (384006168, 384016682)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: int = 16000000
    engram_compressed_vocab_size: int = 99092
    engram_pad_token_id: int = 2
    # DSpark drafts
    num_nextn_predict_layers: int = 3
    dspark_block_size: int = 5
    dspark_noise_token_id: int = 128799
    dspark_target_layer_ids: tuple[int, ...] = (37, 38, 39)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    # not keys of text_config
    vision: bool = True  # config.json has a vision_config: routers carry a bias for image tokens, unused in text
    quantized: bool = True  # config.json has a quantization_config: FP8 dense, FP4 expert weights
    formats: Formats = Formats()

    def __post_init__(self):
        from_lists = {
            f.name: tuple(value) for f in dataclasses.fields(self) if isinstance(value := getattr(self, f.name), list)
        }
        for name, value in from_lists.items():
            object.__setattr__(self, name, value)
        _check_sizes(self)
        _check_schedule(self)

    @property
    def dense_format(self) -> str | None:
        """The stored format of dense projections."""
        return "fp8_e8m0_32x32" if self.quantized else None

    @property
    def expert_format(self) -> str | None:
        """The stored format of routed experts."""
        return "fp4_e8m0_32" if self.quantized else None

    @property
    def pool_size(self) -> int:
        """The most entries a Reindex layer scores for a query, at any context length."""
        return self.candidate_topk_blocks * self.candidate_block_size

    @property
    def first_decoder_layer(self) -> int:
        """The last KV source: the layers from here on add nothing to the global pools."""
        return max(self.kv_source_layer_ids, default=0)

    @property
    def decoder_tail(self) -> int:
        """How many of a prompt's last tokens have to enter the first decoder layer for exact results: 2541."""
        return (self.num_hidden_layers - self.first_decoder_layer) * (self.sliding_window - 1) + 1


def require(ok: bool, message: str):
    """Raises the ValueError of a config that does not hold."""
    if not ok:
        raise ValueError(f"config: {message}")


def _check_sizes(c: Config):
    positive = (
        "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank o_groups"
        " o_lora_rank sliding_window index_n_heads index_head_dim index_topk candidate_topk_blocks candidate_block_size"
        " n_routed_experts num_experts_per_tok moe_intermediate_size hc_sinkhorn_iters hc_mult max_position_embeddings"
    )
    for name in positive.split():
        value = getattr(c, name)
        require(type(value) is int and value >= 1, f"{name}={value!r}; it must be a whole number, 1 or more")
    require(c.hc_mult >= 2, f"hc_mult={c.hc_mult}; hyper-connections need 2 streams or more")
    for name, group in (("head_dim", 32), ("index_head_dim", 32), ("qk_rope_head_dim", 2)):
        size = getattr(c, name)
        require(size % group == 0, f"{name}={size} is not a multiple of {group}; try {size + -size % group}")
    widest = min(c.head_dim, c.index_head_dim)
    require(c.qk_rope_head_dim <= widest, f"qk_rope_head_dim={c.qk_rope_head_dim} exceeds a head of {widest} channels")
    width = c.num_attention_heads * c.head_dim
    require(width % c.o_groups == 0, f"o_groups={c.o_groups} does not divide the {width} channels of all heads")
    for name, experts in (
        ("num_experts_per_tok", "n_routed_experts"),
        ("dspark_num_experts_per_tok", "dspark_n_routed_experts"),
    ):
        wanted, there = getattr(c, name), getattr(c, experts)
        require(1 <= wanted <= there, f"{name}={wanted} is not between 1 and {experts}={there}")
    scorers = ("sqrtsoftplus", "sigmoid", "softmax")
    require(c.scoring_func in scorers, f"scoring_func={c.scoring_func!r} is not one of {scorers}")
    if c.quantized:
        for name in ("hidden_size", "moe_intermediate_size"):
            size = getattr(c, name)
            require(size % 32 == 0, f"{name}={size} is not a multiple of the FP4 weight group 32")
    if c.engram_layer_ids:
        count, rows = len(c.engram_layer_ids), c.engram_num_embeddings
        require(len(rows) == count, f"engram_num_embeddings lists {len(rows)} tables for {count} engram layers")
        require(max(rows) < 2**31, f"engram_num_embeddings={max(rows)} does not fit 31 bits")
        require(c.engram_max_ngram_size >= 2, f"engram_max_ngram_size={c.engram_max_ngram_size} is under 2")
        require(c.engram_head_dim % 32 == 0, f"engram_head_dim={c.engram_head_dim} is not a multiple of 32")
        require(c.engram_vocab_size < 2**30, f"engram_vocab_size={c.engram_vocab_size} must be under 2**30")
        pad = c.engram_pad_token_id
        require(0 <= pad < c.vocab_size, f"engram_pad_token_id={pad} is not a token of the {c.vocab_size} there are")
    if c.num_nextn_predict_layers:
        require(bool(c.dspark_target_layer_ids), "draft stages need dspark_target_layer_ids")
        noise = c.dspark_noise_token_id
        require(0 <= noise < c.vocab_size, f"dspark_noise_token_id={noise} is not a token of {c.vocab_size}")
        size = c.dspark_block_size
        require(type(size) is int and size >= 1, f"dspark_block_size={size!r}; a draft is 1 token or more")


def _check_schedule(c: Config):
    layers, drafts = c.num_hidden_layers, c.num_nextn_predict_layers
    ratios = c.compress_ratios
    require(
        len(ratios) in (layers, layers + drafts),
        f"compress_ratios lists {len(ratios)} layers; it must list num_hidden_layers={layers}"
        f" and may list the {drafts} draft stages behind them",
    )
    require(min(ratios) >= 0, f"compress_ratios holds {min(ratios)}; a ratio is 0 or more tokens an entry")
    require(not any(ratios[layers:]), f"compress_ratios of the draft stages are {ratios[layers:]}; they must be 0")
    for name in ("kv_source_layer_ids", "index_source_layer_ids", "engram_layer_ids", "dspark_target_layer_ids"):
        ids = getattr(c, name)
        require(list(ids) == sorted(set(ids)), f"{name}={list(ids)} must ascend without repeats")
        require(all(0 <= i < layers for i in ids), f"{name}={list(ids)} names a layer outside 0..{layers - 1}")
    targets = list(c.dspark_target_layer_ids)
    require(0 not in targets, f"dspark_target_layer_ids={targets} names layer 0, which no layer feeds; legal are 1 on")
    for i in c.kv_source_layer_ids:
        require(ratios[i] > 0, f"KV source {i} has compress ratio 0, so it has nothing to compress")
        require(
            i in c.index_source_layer_ids,
            f"KV source {i} is not in index_source_layer_ids; its new entries need a selection of their own",
        )
    for i in range(layers):
        if ratios[i] == 0:
            require(i not in c.index_source_layer_ids, f"index source {i} has compress ratio 0, so nothing to index")
            continue
        source = max((k for k in c.kv_source_layer_ids if k <= i), default=None)
        require(source is not None, f"layer {i} has ratio {ratios[i]} but no KV source at or before it")
        assert source is not None
        require(
            ratios[source] == ratios[i],
            f"layer {i} has ratio {ratios[i]}, but its KV source {source} has ratio {ratios[source]}",
        )
    source = c.candidate_source_layer_id
    if source is not None:
        require(source in c.index_source_layer_ids, f"candidate_source_layer_id={source} is not an index source")
        last = c.first_decoder_layer
        require(
            source >= last,
            f"candidate_source_layer_id={source} comes before the last KV source {last}; "
            "later indexers score the candidate source's keys, so it must read the last pool",
        )
        require(
            c.index_topk <= c.pool_size,
            f"index_topk={c.index_topk} exceeds the candidate pool of {c.candidate_topk_blocks} blocks"
            f" x {c.candidate_block_size} = {c.pool_size} entries",
        )


def layer_plan(cfg: Config) -> tuple[LayerSpec, ...]:
    """Derives the role of every backbone layer from the config's lists (section 1)."""
    plan = []
    for i in range(cfg.num_hidden_layers):
        ratio, source = cfg.compress_ratios[i], cfg.candidate_source_layer_id
        if ratio == 0:
            role = Role.WINDOW
        elif i in cfg.kv_source_layer_ids:
            role = Role.FULL
        elif i in cfg.index_source_layer_ids:
            role = Role.REINDEX
        else:
            role = Role.REUSE
        indexes = role in (Role.FULL, Role.REINDEX)
        plan.append(
            LayerSpec(
                layer=i,
                role=role,
                ratio=ratio,
                pool=None if ratio == 0 else sum(k <= i for k in cfg.kv_source_layer_ids) - 1,
                builds_candidates=i == source,
                scores_candidates=indexes and source is not None and i > source,
                engram=cfg.engram_layer_ids.index(i) if i in cfg.engram_layer_ids else None,
                decoder=i >= cfg.first_decoder_layer,
            )
        )
    return tuple(plan)


def group_multiple(cfg: Config) -> int:
    """The least number of tokens that is whole groups in every compressed layer."""
    return math.lcm(*(ratio for ratio in cfg.compress_ratios if ratio > 0))


v41_flash = Config()

tiny = Config(  # the model of the golden tensors: every role in 9 layers
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=9,
    max_position_embeddings=256,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=8,
    q_lora_rank=32,
    o_groups=2,
    o_lora_rank=32,
    sliding_window=8,
    rope_scaling=RopeScaling(original_max_position_embeddings=64),
    compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0),
    kv_source_layer_ids=(1, 3, 4),
    index_source_layer_ids=(1, 3, 4, 6, 8),
    index_n_heads=2,
    index_head_dim=32,
    index_topk=4,
    candidate_source_layer_id=4,
    candidate_topk_blocks=3,
    candidate_block_size=4,
    n_routed_experts=6,
    num_experts_per_tok=2,
    moe_intermediate_size=32,
    swiglu_limit=2.0,
    engram_layer_ids=(1, 3),
    engram_num_embeddings=(462, 630),
    engram_n_heads=2,
    engram_head_dim=32,
    engram_vocab_size=64,
    engram_compressed_vocab_size=406,
    num_nextn_predict_layers=2,
    dspark_block_size=3,
    dspark_noise_token_id=2,
    dspark_target_layer_ids=(6, 7, 8),
    dspark_markov_rank=32,
    dspark_n_routed_experts=4,
    dspark_num_experts_per_tok=2,
    vision=False,
)
