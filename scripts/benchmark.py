"""Times every operation on one GPU beside plain JAX, the public peer and the floor of the hardware: one table.

    python scripts/benchmark.py --only scores topk --json figures.json

Times are medians of the GPU time of all kernels of a call (CUPTI), warm, random data, the L2 cache emptied before each
call as the peers' timer does; "kernels" says how many there were, and the gaps between them are not in the figure.
Steps of the attention stack are wall time of a chain of steps. "floor" is bytes / 4.3 TB/s or operations / the
tensor-core rate, whichever is more. Outputs are compared with plain JAX's.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.index_scores import index_scores
from pallas_kernels.masked_topk import masked_topk
from pallas_kernels.pool_scores import pool_scores
from pallas_kernels.quantize import dequantize, quantize
from v41jax import config, init_cache, layer_plan, model
from v41jax.cache import Span
from v41jax.quant import Packed

BYTES_PER_US, BF16_PER_US, FLUSH, COMPILERS = 4.3e6, 784e6, 256 * 2**20, 8
INDEX, ENTRY, WINDOW = "fp4_e8m0_32", "fp4_e4m3_16", "fp8_e8m0_32"
PEERS = pathlib.Path(__file__).with_name("benchmark_peers.py")


@dataclasses.dataclass(frozen=True)
class Case:
    """One measurement: `fn(*args)`, its floor in us, and how its output is compared with plain JAX's."""

    name: str
    fn: Callable
    args: tuple
    floor_us: float
    tolerance: float | None = 0.0  # of the largest value; None: not compared, plain JAX is not run


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Time the operations beside plain JAX and public peers.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", choices=sorted(WORKS), default=sorted(WORKS), help="what to time")
    parser.add_argument("--no-peers", action="store_true", help="leave out the PyTorch peers")
    parser.add_argument("--no-baseline", action="store_true", help="leave out plain JAX, and the comparison with it")
    parser.add_argument("--repeat", type=int, default=15, help="timed calls of each case")
    parser.add_argument("--json", help="write the rows there too")
    args = parser.parse_args(argv)
    if jax.default_backend() != "gpu":
        parser.error(f"the default device is {jax.default_backend()}; this benchmark times one GPU")
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {time.strftime('%Y-%m-%d')}", flush=True)
    peers = {}
    for work in args.only:
        if not args.no_peers and work in ("scores", "topk", "attention"):
            peers |= time_peers(work)
    rows = []
    print(f"{'case':42}{'us':>10}{'kernels':>9}{'compile s':>11}{'plain us':>11}{'peer us':>10}{'floor us':>10}")
    for work in args.only:
        for row in WORKS[work](args):
            row["peer_us"] = peers.get(row["case"])
            rows.append(row)
            print(line(row), flush=True)
            if args.json:
                pathlib.Path(args.json).write_text(json.dumps(rows, indent=1))
    return 0


def line(row: dict) -> str:
    """Formats one row of the table."""
    columns = (("us", 10, ".1f"), ("kernels", 9, "d"), ("compile_s", 11, ".1f"), ("plain_us", 11, ".1f"),
               ("peer_us", 10, ".1f"), ("floor_us", 10, ".1f"))  # fmt: skip
    cells = (f"{'-' if row.get(key) is None else format(row[key], spec):>{width}}" for key, width, spec in columns)
    return f"{row['case']:42}{''.join(cells)}  {row.get('note', '')}"


def time_peers(work: str) -> dict[str, float]:
    """Runs the peers of one work in a process of their own: microseconds by case."""
    done = subprocess.run([sys.executable, str(PEERS), work], capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"peers of {work} did not run: {done.stderr.strip().splitlines()[-1:]}", flush=True)
    lines = (json.loads(text) for text in done.stdout.splitlines() if text.startswith("{"))
    return {each["case"]: each["us"] for each in lines}


def compile_ahead(fn: Callable, args: tuple, backend: str | None):
    """Compiles a function of (junk, *args) that empties the L2 cache, then runs `fn`; returns it and seconds."""

    @jax.jit
    def emptied(junk, *args):
        junk, args = jax.lax.optimization_barrier((junk + jnp.uint8(1), args))  # one kernel, before those of `fn`
        return junk, fn(*args)

    start = time.perf_counter()
    with dispatch.default(backend) if backend else contextlib.nullcontext():
        compiled = emptied.lower(jax.ShapeDtypeStruct((FLUSH,), jnp.uint8), *args).compile()
    return compiled, time.perf_counter() - start  # `emptied` itself would be traced anew where `backend` is no default


def measure(compiled, args: tuple, repeat: int):
    """Times a function of `compile_ahead`: (output, median us of its kernels, their number)."""
    from jax.experimental.mosaic.gpu import profiler

    (_, out), calls = profiler.measure(compiled, aggregate=False, iterations=repeat)(jnp.zeros(FLUSH, jnp.uint8), *args)
    times = [[ms * 1e3 for _, ms in call] for call in calls]
    for call in times:  # constants that `fn` needs may be made before the cache is emptied
        call.remove(next(us for us in call if us > FLUSH / BYTES_PER_US))
    return out, statistics.median(map(sum, times)), len(times[0])


def run_cases(cases: Iterator[Case], args) -> Iterator[dict]:
    """Compiles all cases, COMPILERS at a time, then measures one after another, each beside plain JAX."""
    cases = list(cases)
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        own = [pool.submit(compile_ahead, case.fn, case.args, None) for case in cases]
        plain = [
            None if case.tolerance is None or args.no_baseline else
            pool.submit(compile_ahead, case.fn, case.args, "reference") for case in cases
        ]  # fmt: skip
    for case, kernel, reference in zip(cases, own, plain, strict=True):
        compiled, seconds = kernel.result()
        out, us, kernels = measure(compiled, case.args, args.repeat)
        row = {"case": case.name, "us": us, "kernels": kernels, "compile_s": seconds, "floor_us": case.floor_us}
        if reference is not None:
            want, row["plain_us"], _ = measure(reference.result()[0], case.args, 3)
            row["note"] = difference(out, want, case.tolerance)
            del want
        yield row
        del out


def difference(got, want, tolerance: float) -> str:
    """Says whether two outputs agree: exactly, or by the largest difference over the largest value."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if tolerance == 0:
            if not bool((a == b).all()):
                return f"DIFFERS from plain JAX in {float((a != b).mean()):.2e} of the values"
            continue
        finite = jnp.isfinite(b)
        if not bool((jnp.isfinite(a) == finite).all()):
            return "DIFFERS from plain JAX in what is finite"
        a, b = (jnp.where(finite, x.astype(jnp.float32), 0) for x in (a, b))
        worst = max(worst, float(jnp.abs(a - b).max() / jnp.abs(b).max()))
    return ("equal" if tolerance == 0 else f"within {worst:.1e}") if worst <= tolerance else f"DIFFERS by {worst:.1e}"


# ---- the cases


class Random:
    """Random arrays, a new key each."""

    def __init__(self):
        """Starts at key 0."""
        self.keys = map(functools.partial(jax.random.fold_in, jax.random.key(0)), range(10**6))

    def normal(self, *shape, dtype=jnp.float32):
        """Standard normal."""
        return jax.random.normal(next(self.keys), shape, dtype)

    def bytes(self, *shape, low=0, high=256):
        """Uniform uint8 in [low, high)."""
        return jax.random.randint(next(self.keys), shape, low, high, jnp.int32).astype(jnp.uint8)

    def ids(self, *shape, below: int):
        """Uniform i32, ascending along the last axis."""
        return jnp.sort(jax.random.randint(next(self.keys), shape, 0, below, jnp.int32), axis=-1)

    def weight(self, shape):
        """A weight in place of a shape: small floats, ones for a vector, FP8 codes without NaN, scales near 2^-7."""
        if isinstance(shape, Packed):
            scales = self.bytes(*shape.scales.shape, low=118, high=122)
            return Packed(self.bytes(*shape.codes.shape, high=120), scales, shape.format)
        return self.normal(*shape.shape, dtype=jnp.bfloat16) / 50 if shape.ndim > 1 else jnp.ones(shape.shape)

    def rows(self, format: str, *shape):
        """Planes of packed rows, made without a float array of their size."""
        *lead, width = shape
        e2m1 = format != WINDOW
        codes = self.bytes(*lead, width // 2) if e2m1 else self.bytes(*lead, width, high=120)
        scales = self.bytes(
            *lead,
            width // (16 if format == ENTRY else 32),
            low=40 if format == ENTRY else 118,
            high=56 if format == ENTRY else 122,
        )
        return codes, scales


def index_case(random: Random, B: int, T: int, S: int):
    """Queries, weights and planes of keys."""
    query, _ = quantize(random.normal(B, T, 32, 128), format=INDEX, implementation="reference")
    query = dequantize(query, _, format=INDEX, dtype=jnp.bfloat16, implementation="reference")
    return query, random.normal(B, T, 32), *random.rows(INDEX, B, S, 128)


def scores(args) -> Iterator[dict]:
    """Indexer scores, block maxima out, and the scores themselves in prefill."""

    def cases():
        for name, B, S in (("1 x 1M", 1, 1 << 20), ("8 x 1M", 8, 1 << 20), ("32 x 64K", 32, 65536)):
            arrays = (*index_case(Random(), B, 1, S), jnp.full((B, 1), S, jnp.int32))
            fn = functools.partial(index_scores, format=INDEX, block_size=8)
            yield Case(f"scores decode {name}", fn, arrays, B * S * 68.5 / BYTES_PER_US, 1e-5)
        for name, block in (("", 8), (" all written", 1)):
            arrays = (*index_case(Random(), 1, 2048, 65536), jnp.full((1, 2048), 65536, jnp.int32))
            fn = functools.partial(index_scores, format=INDEX, block_size=block)
            yield Case(f"scores prefill 2048 x 64K{name}", fn, arrays, 2048 * 65536 * 8192 / BF16_PER_US, 1e-5)

    return run_cases(cases(), args)


def pool(args) -> Iterator[dict]:
    """Scores inside candidate pools, at two context lengths."""

    def cases():
        for T in (1, 8, 32, 128):
            for name, S in (("64K", 65536), ("1M", 1 << 20)):
                random = Random()
                query, weight, *keys = index_case(random, 1, T, S)
                visible = jnp.full((1, T), S, jnp.int32)
                blocks = jnp.sort(jax.vmap(lambda k, S=S: jax.random.choice(k, S // 8, (2048,), replace=False))(
                    jax.random.split(jax.random.key(7), T))).astype(jnp.int32)[None]  # fmt: skip
                fn = functools.partial(pool_scores, format=INDEX, block_size=8)
                arrays = (query, weight, *keys, blocks, visible)
                yield Case(f"pool {T} queries at {name}", fn, arrays, T * 16384 * 72 / BYTES_PER_US, 1e-5)

    return run_cases(cases(), args)


def topk(args) -> Iterator[dict]:
    """Exact top-k."""

    def cases():
        shapes = [(512, rows, 1 << 20) for rows in (1, 8, 64)] + [(2048, rows, 131072) for rows in (1, 8, 64)]
        shapes += [(512, rows, width) for width in (4096, 16384) for rows in (1, 32, 2048)]
        for k, rows, width in shapes:
            values = Random().normal(rows, width)
            fn = functools.partial(masked_topk, k=k)
            yield Case(f"top-{k} of {rows} x {width}", fn, (values,), rows * width * 4 / BYTES_PER_US)

    return run_cases(cases(), args)


def attention(args) -> Iterator[dict]:
    """Sparse attention over 128 window rows and 512 selected entries a query, 64 heads of 512."""

    def cases():
        for name, B, T, S in (("decode 1", 1, 1, 65536), ("decode 32", 32, 1, 65536), ("decode 128", 128, 1, 65536),
                              ("prefill 2048", 1, 2048, 65536)):  # fmt: skip
            random, P = Random(), 128 if T == 1 else 128 + T
            arrays = (
                random.normal(B, T, 64, 512, dtype=jnp.bfloat16), random.normal(64), random.rows(WINDOW, B, P, 512),
                random.ids(B, T, 128, below=P), random.rows(ENTRY, B, S, 512), random.ids(B, T, 512, below=S),
            )  # fmt: skip
            fn = functools.partial(gather_attention, scale=512**-0.5, window_format=WINDOW, entry_format=ENTRY)
            flops, size = B * T * 64 * 640 * 512 * 4, B * T * (128 * 528 + 512 * 288 + 64 * 512 * 4)
            yield Case(f"attention {name}", fn, arrays, max(flops / BF16_PER_US, size / BYTES_PER_US), 2e-2)

    return run_cases(cases(), args)


def quantization(args) -> Iterator[dict]:
    """Quantise and dequantise 1M main entries."""

    def cases():
        x = Random().normal(1 << 20, 512, dtype=jnp.bfloat16)
        codes, scales = jax.jit(functools.partial(quantize, format=ENTRY, implementation="reference"))(x)
        size = x.size * 2 + codes.size + scales.size
        yield Case("quantise 1M entries", functools.partial(quantize, format=ENTRY), (x,), size / BYTES_PER_US)
        fn = functools.partial(dequantize, format=ENTRY, dtype=jnp.bfloat16)
        yield Case("dequantise 1M entries", fn, (codes, scales), size / BYTES_PER_US)

    return run_cases(cases(), args)


def experts(args) -> Iterator[dict]:
    """Routed experts of one layer: w1, w3 and w2 of 6 experts a token, packed FP4; and dense FP8 projections."""
    E, D, F = 384, 5120, 2304

    def planes(random, out, width):
        return random.bytes(E, out, width // 2), random.bytes(E, out, width // 32, low=118, high=122)

    def routed(x, expert, w1, w3, w2):
        gate, up = (expert_matmul(x, *w, expert, format=INDEX) for w in (w1, w3))
        hidden = (jax.nn.silu(gate) * up * jnp.float32(1e-4)).astype(x.dtype)
        return expert_matmul(hidden, *w2, expert, format=INDEX)

    def cases():
        random = Random()
        weights = [planes(random, out, width) for out, width in ((F, D), (F, D), (D, F))]
        for tokens in (1, 8, 32):
            expert = jnp.sort(jax.random.choice(jax.random.key(tokens), E, (6 * tokens,), replace=tokens > 64))
            x = random.normal(6 * tokens, 1, D, dtype=jnp.bfloat16)
            size = 6 * tokens * 3 * D * F * (1 / 2 + 1 / 32)
            arrays = (x, expert.astype(jnp.int32), *weights)
            yield Case(f"experts {tokens} tokens", routed, arrays, size / BYTES_PER_US, 2e-2)
        del weights
        for out, width in ((32768, 1280), (1280, 5120), (512, 5120), (5120, 8192)):
            w = random.bytes(1, out, width, high=120), random.bytes(1, out // 32, width // 32, low=118, high=122)
            for rows in (1, 8):
                x, zero = random.normal(1, rows, width, dtype=jnp.bfloat16), jnp.zeros(1, jnp.int32)
                fn = functools.partial(expert_matmul, format="fp8_e8m0_32x32")
                yield Case(f"dense {out} x {width}, {rows} rows", fn, (x, *w, zero), out * width / BYTES_PER_US, 1e-3)

    return run_cases(cases(), args)


STACK = config.Config(
    num_hidden_layers=8, compress_ratios=(0, 2, 2, 2, 1, 1, 1, 1), kv_source_layer_ids=(1, 4),
    index_source_layer_ids=(1, 4, 6), candidate_source_layer_id=4, engram_layer_ids=(), engram_num_embeddings=(),
    num_nextn_predict_layers=0, dspark_target_layer_ids=(), n_routed_experts=6, vocab_size=1024,
)  # fmt: skip


def stack(args) -> Iterator[dict]:
    """One decode step of the attention halves of 8 layers of released width: window, Full, Reuse x2, Full with
    candidates, Reuse, Reindex, Reuse; mHC included, experts not. Wall time of a chain of 50 steps, caches donated."""
    shapes = jax.eval_shape(lambda: model.init_params(STACK, jax.random.key(0)))["layers"]
    shapes = [{k: v for k, v in layer.items() if "ffn" not in k} for layer in shapes]
    layers = jax.tree.map(Random().weight, shapes, is_leaf=lambda x: isinstance(x, Packed))

    def step(layers, windows, pools, flow, length_B):
        span, windows, pools = Span(length_B, jnp.ones_like(length_B), 1), list(windows), list(pools)
        for layer, weights in zip(layer_plan(STACK), layers, strict=True):
            pool = None if layer.pool is None else pools[layer.pool]
            _, flow, windows[layer.layer], pool = model.run_attention(
                weights, flow, windows[layer.layer], pool, span=span, held_B=length_B,
                first_B=jnp.zeros_like(length_B), keeps=1, layer=layer, cfg=STACK,
            )  # fmt: skip
            if layer.pool is not None:
                pools[layer.pool] = pool
        return windows, pools, dataclasses.replace(flow, selection=None)

    def state(B: int, context: int):
        cache = init_cache(STACK, B, context + 256)
        streams = Random().normal(B, 1, 4, 5120, dtype=jnp.bfloat16), jnp.ones((B, 1, 4), jnp.float32)
        return list(cache.windows), list(cache.pools), model.Flow(*streams, None, ())

    def compile_step(backend: str | None, B: int, context: int):
        start = time.perf_counter()
        with dispatch.default(backend) if backend else contextlib.nullcontext():
            own = jax.jit(lambda *a: step(*a), donate_argnums=(1, 2, 3))  # a function of its own: jit keeps no backend
            args = layers, *jax.eval_shape(lambda: state(B, context)), jax.ShapeDtypeStruct((B,), jnp.int32)
            return own.lower(*args).compile(), time.perf_counter() - start

    def time_step(run, B: int, context: int) -> float:
        carried, length, times = state(B, context), jnp.full((B,), context, jnp.int32), []
        for _ in range(5):
            start = time.perf_counter()
            for _ in range(10):
                (*carried,) = run(layers, *carried, length)
            jax.block_until_ready(carried)
            times.append((time.perf_counter() - start) / 10 * 1e6)
        return statistics.median(times)

    cases = [(B, *at) for B in (1, 8) for at in (("4K", 4096), ("64K", 65536), ("1M", (1 << 20) - 256))]
    backends = (None,) if args.no_baseline else (None, "reference")
    with concurrent.futures.ThreadPoolExecutor(COMPILERS) as pool:
        steps = {(b, *case): pool.submit(compile_step, b, case[0], case[2]) for b in backends for case in cases}
    for B, name, context in cases:
        run, seconds = steps[None, B, name, context].result()
        row = {"case": f"attention stack, B={B}, at {name}", "us": time_step(run, B, context), "compile_s": seconds}
        if not args.no_baseline:
            row["plain_us"] = time_step(steps["reference", B, name, context].result()[0], B, context)
        yield row


WORKS = {
    "scores": scores, "pool": pool, "topk": topk, "attention": attention, "quantize": quantization,
    "experts": experts, "stack": stack,
}  # fmt: skip

if __name__ == "__main__":
    raise SystemExit(main())
