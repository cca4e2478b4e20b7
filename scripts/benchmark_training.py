"""Measures training steps of a model 1024 wide with 12 layers: tokens a second, utilisation, memory a token.

    python scripts/benchmark_training.py                          # rows of 4K and of 32K tokens, 32K tokens a step
    python scripts/benchmark_training.py --lengths 4096 --tokens 16384 --trace DIR

Random weights and tokens, bfloat16, the whole step: forward, KL of the indexers, gradients, Muon and AdamW. Utilisation
is what `v41jax/training/flops.py` counts over --peak; memory is the allocator's highest mark. One JSON line a length.
"""

import argparse
import functools
import json
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import Config, model
from v41jax.training import export, flops, step
from v41jax.training.finetune import begin_stage
from v41jax.training.progress import device_memory
from v41jax.training.settings import Settings, Stage

WIDE = Config(
    vocab_size=32768,
    hidden_size=1024,
    num_hidden_layers=12,
    num_attention_heads=16,
    head_dim=128,
    qk_rope_head_dim=32,
    q_lora_rank=512,
    o_groups=4,
    o_lora_rank=256,
    sliding_window=128,
    compress_ratios=(0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 1, 1),
    kv_source_layer_ids=(2, 6),
    index_source_layer_ids=(2, 6, 8, 10),
    index_n_heads=8,
    index_head_dim=64,
    index_topk=512,
    candidate_source_layer_id=6,
    candidate_topk_blocks=512,
    candidate_block_size=8,
    n_routed_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=1024,
    engram_layer_ids=(),
    engram_num_embeddings=(),
    num_nextn_predict_layers=0,
    dspark_target_layer_ids=(),
    max_position_embeddings=65536,
)


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    lengths = [4096, 32768]
    parser.add_argument("--lengths", type=int, nargs="+", default=lengths, help="tokens of a row (default: 4096 32768)")
    parser.add_argument("--tokens", type=int, default=32768, help="tokens of a step (default: 32768)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps, after two more (default: 10)")
    parser.add_argument("--kind", choices=["dense", "warmup", "sparse"], default="sparse", help="(default: sparse)")
    parser.add_argument("--peak", type=float, default=989e12, help="FLOP/s of the device (default: an H200's bfloat16)")
    parser.add_argument("--trace", type=pathlib.Path, help="directory for a profile of one step (default: none)")
    args = parser.parse_args(argv)
    for length in args.lengths:
        if args.tokens % length:
            parser.error(f"--tokens {args.tokens} is not a multiple of rows of {length}")
    return args


def measure(length: int, args, *, cfg: Config) -> dict:
    """Times the steps of one row length; see the module docstring."""
    rows = args.tokens // length
    stage = Stage(name="timed", kind=args.kind, steps=args.steps + 3)
    settings = Settings(row_length=length, batch_size=rows, dtype="bfloat16", stages=(stage,))
    params = export.to_master(model.init_params(cfg, jax.random.key(0)))
    state, timed = begin_stage(stage, params, settings=settings, cfg=cfg)
    del params
    random = np.random.default_rng(0)
    batch = {
        "tokens_BT": jnp.asarray(random.integers(3, cfg.vocab_size, (rows, length)), jnp.int32),
        "document_BT": jnp.zeros((rows, length), jnp.int32),
    }
    assert isinstance(timed, functools.partial) and timed.func is step.train_step
    start = time.perf_counter()
    seconds = []
    for number in range(args.steps + 2):
        state, metrics = timed(state, batch)
        jax.block_until_ready(state)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        if number == 0 and not np.isfinite(metrics["loss"]):
            raise ValueError(f"the loss of rows of {length} tokens is {metrics['loss']}")
    if args.trace is not None:
        with jax.profiler.trace(str(args.trace / str(length))):
            jax.block_until_ready(timed(state, batch))
    median, memory = statistics.median(seconds[2:]), device_memory()
    rate = args.tokens / median
    return {
        "row_length": length,
        "rows": rows,
        "kind": args.kind,
        "compile_seconds": round(seconds[0], 1),
        "step_seconds": round(median, 4),
        "tokens_per_second": round(rate),
        "flops_per_token": flops.training_flops_per_token(cfg, length=length),
        "utilization": flops.utilization(rate, cfg, length=length, peak_flops=args.peak),
        "peak_bytes_a_token": None if memory is None else round(memory / args.tokens),
        "device": jax.devices()[0].device_kind,
    }


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    args = parse(argv)
    for length in sorted(args.lengths):  # the highest mark of memory never falls
        print(json.dumps(measure(length, args, cfg=WIDE)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
