"""The tensors of the released reference, each file read once."""

import functools
import pathlib

from safetensors.numpy import load_file

GOLDEN = pathlib.Path(__file__).parent / "golden"


@functools.cache
def vectors():
    """Single operations: {"quant.x": array, ...}."""
    return load_file(GOLDEN / "vectors.safetensors")


@functools.cache
def model(name: str):
    """Whole passes of a tiny model: "tiny-f32" or "tiny-fp8fp4"."""
    return load_file(GOLDEN / name / "golden.safetensors")
