"""Measures loading a released-layout checkpoint: speed against plain reading, and host memory beyond the arrays.

    python scripts/benchmark_load.py --gigabytes 2

A synthetic checkpoint is written first, half of it experts and half Engram tables, from random bytes. "cold" runs
follow posix_fadvise(DONTNEED), which drops this machine's page cache of the files and no cache below it.
"""

import argparse
import dataclasses
import gc
import json
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np

from v41jax import checkpoint, config, config_json, safetensors, tree
from v41jax.quant import Packed
from v41jax.release import Wanted, release_layout

ASSET = pathlib.Path(config.__file__).parent / "assets" / "tiny-fp8fp4"
ROWS = (1200114, 1200592)  # of the two Engram tables when engram_vocab_size is 200000


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        description="Measure loading a synthetic released-layout checkpoint: speed and host memory.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the checkpoint, in 10^9 bytes, roughly")
    parser.add_argument("--directory", help="where to make it; None: the temporary directory")
    args = parser.parse_args(argv)
    if not args.gigabytes > 0:
        parser.error(f"--gigabytes {args.gigabytes} must be above 0")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = pathlib.Path(directory)
        cfg = scaled_config(args.gigabytes * 1e9)
        write(path, cfg)
        checkpoint.load_checkpoint(ASSET, dtype="bfloat16")  # starts JAX, so that its own memory is not counted
        files = sorted(path.glob("*.safetensors"))
        size = sum(file.stat().st_size for file in files)
        print(f"{len(files)} files, {size:,} bytes; device: {jax.devices()[0].device_kind}")
        print(peak(path))
        for cache in ("cold", "warm"):
            for what, run in (("plain read", read), ("plain read to new memory", read_to_memory), ("load", load)):
                gc.collect()  # JAX gives memory it took over from NumPy back at its next chance, not at once
                if cache == "cold":
                    drop_cache(files)
                start = time.perf_counter()
                run(path)
                seconds = time.perf_counter() - start
                print(f"{cache} {what}: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")
    return 0


def scaled_config(nbytes: float) -> config.Config:
    """Scales the tiny model: the released expert shape where two or more fit, a smaller one below that."""
    hidden, width = (5120, 2304) if nbytes >= 1e9 else (1024, 512)
    blocks = config.tiny.num_hidden_layers + config.tiny.num_nextn_predict_layers
    expert = blocks * 3 * hidden * width * 17 // 32  # FP4, and a scale byte for 32 values
    experts = max(2, round(nbytes / 2 / expert))
    return dataclasses.replace(
        config.tiny,
        hidden_size=hidden,
        moe_intermediate_size=width,
        n_routed_experts=experts,
        dspark_n_routed_experts=experts,
        engram_vocab_size=200000,
        engram_num_embeddings=ROWS,
        engram_head_dim=32 * max(1, round(nbytes / 2 / (sum(ROWS) * 33))),
    )


def write(path: pathlib.Path, cfg: config.Config) -> None:
    """Writes a checkpoint of random bytes, a few MiB of it in memory at a time."""
    rng = np.random.default_rng(0)

    def blocks(dtype: np.dtype, want: Wanted, piece: int = 1 << 22) -> Iterator[np.ndarray]:
        left = int(np.prod(want.shape)) * dtype.itemsize
        while left:
            block = np.frombuffer(rng.bytes(min(piece, left)), dtype)
            yield block
            left -= block.nbytes

    sources = []
    for name, want in release_layout(cfg).items():
        dtype = safetensors.STORED[want.dtypes[0]]
        source = safetensors.Source(name, want.dtypes[0], want.shape, lambda d=dtype, w=want: blocks(d, w))
        sources.append(source)
    # A load follows the file order: memory it uses beside the arrays would hide behind arrays still to come.
    sources.sort(key=lambda source: source.nbytes)
    safetensors.write_directory(path, sources, shard_bytes=500_000_000)
    (path / "config.json").write_text(json.dumps(config_json.to_json(cfg)))
    shutil.copyfile(ASSET / checkpoint.TOKENIZER, path / checkpoint.TOKENIZER)
    os.sync()


def drop_cache(files: list[pathlib.Path]) -> None:
    """Asks the kernel to forget the files."""
    for file in files:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read(path: pathlib.Path) -> None:
    """Reads the files from end to end into one small buffer."""
    buffer = bytearray(1 << 24)
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def read_to_memory(path: pathlib.Path) -> list[np.ndarray]:
    """Reads the files and keeps them, as a load does: this also pays for the memory."""
    kept = []
    for file in sorted(path.glob("*.safetensors")):
        with file.open("rb", buffering=0) as opened:
            kept.append(np.empty(file.stat().st_size, np.uint8))
            view, done = memoryview(kept[-1]), 0
            while count := opened.readinto(view[done : done + (1 << 24)]):
                done += count
    return kept


def load(path: pathlib.Path) -> dict:
    """Loads the checkpoint, packed."""
    _, params = checkpoint.load_checkpoint(path, dtype="bfloat16")
    return params


def peak(path: pathlib.Path) -> str:
    """Loads once and says how far the process's resident memory, mapped file pages included, passed the arrays.

    To be called first: later, memory that was freed but not given back to the system would hide what is used.
    """
    before = reset_peak()
    params = load(path)
    if before is None:
        return "extra host memory: this system does not tell"
    largest = max(tree.nbytes(leaf) for leaf in jax.tree.leaves(params, is_leaf=lambda x: isinstance(x, Packed)))
    held = tree.nbytes(params) if jax.default_backend() == "cpu" else 0  # elsewhere the arrays are not on the host
    extra = status("VmHWM") - before - held
    return (
        f"extra host memory: {extra / 2**20:.1f} MiB at the peak of a load, {extra / largest:.3f} x the largest array"
        f" of {largest / 2**20:.1f} MiB; the arrays are {tree.nbytes(params) / 2**20:.1f} MiB"
    )


def reset_peak() -> int | None:
    """Resets the kernel's record of the process's peak and returns resident bytes; None where there is none."""
    try:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return status("VmRSS")


def status(field: str) -> int:
    """Reads a field of /proc/self/status, in bytes. File pages that are mapped count."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


if __name__ == "__main__":
    sys.exit(main())
