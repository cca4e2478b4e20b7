"""Times public PyTorch GPU kernels that do the same work as ours, for `benchmark.py`; one JSON line a measurement.

    python scripts/benchmark_peers.py scores|attention|topk

Packages, installed with --no-deps beside torch 2.11: scores: sgl-deep-gemm 0.1.2 and apache-tvm-ffi 0.1.9 (FP8 keys of
132 bytes); attention: sgl-flash-mla 1.0.0 (its Hopper kernels; bf16 rows in prefill, 584-byte FP8 rows in decode);
topk: torch alone. Medians of do_bench, which empties the L2 cache before each run; random data.
"""

import argparse
import json

HEADS, INDEX_DIM, QUERY_HEADS, HEAD_DIM, ROWS = 32, 128, 64, 512, 640


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=sorted(WORKS), help="what to time")
    args = parser.parse_args(argv)
    import torch

    torch.manual_seed(0)
    WORKS[args.work](torch)
    return 0


def report(case: str, fn) -> None:
    """Times `fn` and prints {"case", "us"}."""
    from triton.testing import do_bench

    us = do_bench(fn, warmup=50, rep=200, return_mode="median") * 1e3
    print(json.dumps({"case": case, "us": us}), flush=True)


def scores(torch) -> None:
    """DeepGEMM's FP8 indexer scores."""
    import deep_gemm

    f8 = torch.float8_e4m3fn
    queries, keys = 2048, 65536
    q = torch.randn(queries, HEADS, INDEX_DIM, device="cuda").to(f8)
    k = torch.randn(keys, INDEX_DIM, device="cuda").to(f8)
    scale, weight = torch.rand(keys, device="cuda") + 0.5, torch.randn(queries, HEADS, device="cuda")
    first = torch.zeros(queries, device="cuda", dtype=torch.int32)
    run = lambda: deep_gemm.fp8_mqa_logits(q, (k, scale), weight, first, first + keys)  # noqa: E731
    report("scores prefill 2048 x 64K", run)
    page, sms = 64, torch.cuda.get_device_properties(0).multi_processor_count
    for name, batch, keys in (("1 x 1M", 1, 1 << 20), ("8 x 1M", 8, 1 << 20), ("32 x 64K", 32, 65536)):
        pages = batch * keys // page
        cache = torch.randint(0, 120, (pages, page, 1, INDEX_DIM + 4), device="cuda", dtype=torch.int32)
        cache = cache.to(torch.uint8)
        scales = torch.tensor([0, 0, 128, 63], dtype=torch.uint8, device="cuda")
        cache.view(-1, page * (INDEX_DIM + 4))[:, page * INDEX_DIM :] = scales.repeat(page)
        q = torch.randn(batch, 1, HEADS, INDEX_DIM, device="cuda").to(f8)
        weight = torch.randn(batch, HEADS, device="cuda")
        length = torch.full((batch, 1), keys, device="cuda", dtype=torch.int32)
        table = torch.arange(pages, device="cuda", dtype=torch.int32).view(batch, -1)
        plan = deep_gemm.get_paged_mqa_logits_metadata(length, page, sms)
        arguments = (q, cache, weight, length, table, plan, keys)
        report(f"scores decode {name}", lambda a=arguments: deep_gemm.fp8_paged_mqa_logits(*a))


def attention(torch) -> None:
    """FlashMLA's sparse attention."""
    from flash_mla import flash_mla_interface as flash_mla

    def index(*shape):
        return torch.randint(0, 65536, shape, device="cuda", dtype=torch.int32)

    scale, sink = HEAD_DIM**-0.5, torch.randn(QUERY_HEADS, device="cuda")
    q = torch.randn(2048, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    kv = torch.randn(65536, 1, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
    rows = index(2048, 1, ROWS)
    legacy = {"attn_sink": sink, "use_legacy": True}
    report("attention prefill 2048", lambda: flash_mla.flash_mla_sparse_fwd(q, kv, rows, scale, HEAD_DIM, **legacy))
    for batch in (1, 32, 128):
        cache = torch.randint(0, 110, (1024, 64, 1, 584), device="cuda", dtype=torch.int32).to(torch.uint8)
        one = torch.randn(batch, 1, QUERY_HEADS, HEAD_DIM, device="cuda", dtype=torch.bfloat16)
        plan, _ = flash_mla.get_mla_metadata()
        options = {
            "softmax_scale": scale, "is_fp8_kvcache": True, "indices": index(batch, 1, ROWS - 128),
            "extra_k_cache": cache, "extra_indices_in_kvcache": index(batch, 1, 128), "kv_format": "v4",
        }  # fmt: skip
        arguments = (one, cache, None, None, HEAD_DIM, plan)
        report(
            f"attention decode {batch}",
            lambda a=arguments, o=options: flash_mla.flash_mla_with_kvcache(*a, **o, **legacy),
        )


def topk(torch) -> None:
    """torch.topk, unsorted."""
    shapes = [(512, rows, 1 << 20) for rows in (1, 8, 64)] + [(2048, rows, 131072) for rows in (1, 8, 64)]
    for k, rows, width in [*shapes, (512, 32, 16384), (512, 2048, 16384)]:
        values = torch.randn(rows, width, device="cuda")
        report(f"top-{k} of {rows} x {width}", lambda v=values, k=k: torch.topk(v, k, dim=-1, sorted=False))


WORKS = {"scores": scores, "attention": attention, "topk": topk}

if __name__ == "__main__":
    raise SystemExit(main())
