"""Every Mosaic TPU kernel compiles for real TPU generations at the released shapes, and copies nothing large.

libtpu holds the whole TPU compiler, so no TPU is needed. To add a kernel, append a Case.
"""

import dataclasses
import functools
import importlib.util
import os
import re
import time
from collections.abc import Callable

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # read when libtpu starts; without it that asks the network
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several test processes may compile: none touches a TPU

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pallas_kernels.block_max import block_max
from pallas_kernels.expert_matmul import expert_matmul
from pallas_kernels.formats import FORMATS
from pallas_kernels.gather_attention import gather_attention
from pallas_kernels.index_scores import index_scores
from pallas_kernels.masked_topk import masked_topk
from pallas_kernels.pool_scores import pool_scores
from pallas_kernels.quantize import dequantize, quantize

pytestmark = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the compiler, is missing")

TOPOLOGIES = ["v5e:2x2", "v6e:2x2", "tpu7x:2x2x1"]
MIB = 2**20
COMPILE_SECONDS = 10  # of a kernel; each takes about 1


@dataclasses.dataclass(frozen=True)
class Case:
    """One kernel at one released shape."""

    name: str  # of the operation and shape
    fn: Callable  # of arrays; names implementation="mosaic_tpu", so that it runs or raises
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    temporary_bytes: int  # the most scratch it may ask of device memory


def f32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def u8(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.uint8)


def bf16(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def topk(k):
    return lambda scores, length: masked_topk(scores, length, k=k, implementation="mosaic_tpu")


def attention(query, sink, codes, scales, index, *entries):
    return gather_attention(
        query,
        sink,
        (codes, scales),
        index,
        entries[:2] or None,
        entries[2] if entries else None,
        scale=512**-0.5,
        window_format="fp8_e8m0_32",
        entry_format="fp4_e4m3_16",
        implementation="mosaic_tpu",
    )


def window(B, T, P):
    return bf16(B, T, 64, 512), f32(64), u8(B, P, 512), u8(B, P, 16), i32(B, T, 128)


def index(B, T, S, block_size=1):
    """Scores of S packed keys of 68 bytes; a copy of the plane of scales alone would be 4 B S bytes."""
    fn = functools.partial(index_scores, format="fp4_e8m0_32", block_size=block_size, implementation="mosaic_tpu")
    shapes = bf16(B, T, 32, 128), f32(B, T, 32), u8(B, S, 64), u8(B, S, 4), i32(B, T)
    return Case(f"index_scores, {B} x {T} of {S}, blocks of {block_size}", fn, shapes, B * T * 2**14 + MIB)


def pool(B, T, S, C):
    fn = functools.partial(pool_scores, format="fp4_e8m0_32", block_size=8, implementation="mosaic_tpu")
    shapes = bf16(B, T, 32, 128), f32(B, T, 32), u8(B, S, 64), u8(B, S, 4), i32(B, T, C), i32(B, T)
    # Scores as the kernel leaves them and masked, block ids, queries in another order; beside them nothing.
    return Case(f"pool_scores, {B} x {T} of {C} blocks of {S}", fn, shapes, B * T * 2**19 + MIB)


def entries(rows, channels, format, rotated=False):
    shapes = [bf16(*rows, channels)] + [f32(*rows, 32)] * (2 if rotated else 0)

    def fn(x, *rotation):
        return quantize(x, rotation or None, format=format, implementation="mosaic_tpu")

    name = f"quantize, {format}, {rows} x {channels}{', rotated' if rotated else ''}"
    return Case(name, fn, tuple(shapes), MIB)


def decoded(rows, channels, format):
    f = FORMATS[format]
    shapes = u8(*f.code_shape((*rows, channels))), u8(*f.scale_shape((*rows, channels)))
    fn = functools.partial(dequantize, format=format, dtype=jnp.bfloat16, implementation="mosaic_tpu")
    return Case(f"dequantize, {format}, {rows} x {channels}", fn, shapes, MIB)


def matmul(M, R, E, F, D, format, temporary_bytes=MIB):
    f = FORMATS[format]
    shapes = bf16(M, R, D), u8(*f.code_shape((E, F, D))), u8(*f.scale_shape((E, F, D))), i32(M)
    fn = functools.partial(expert_matmul, format=format, implementation="mosaic_tpu")
    return Case(f"expert_matmul, {M} x {R} of {E} x [{F}, {D}]", fn, shapes, temporary_bytes)


CASES = [
    Case(
        "block_max, 8 queries of 1M entries",
        lambda scores, visible: block_max(scores, visible, block_size=8, implementation="mosaic_tpu"),
        (f32(8, 1, 2**20), i32(8, 1)),
        MIB,
    ),
    Case(
        "block_max, 2048 queries of 65536 entries",
        lambda scores, visible: block_max(scores, visible, block_size=8, implementation="mosaic_tpu"),
        (f32(1, 2048, 2**16), i32(1, 2048)),
        MIB,
    ),
    Case("masked_topk, 1000 of a lone row of 1M", topk(1000), (f32(1, 2**20), i32(1)), MIB),
    Case("masked_topk, 512 of 8 x 1M", topk(512), (f32(8, 2**20), i32(8)), MIB),
    Case("masked_topk, 512 of 128 x 16384", topk(512), (f32(128, 2**14), i32(128)), MIB),
    Case("masked_topk, 2048 of 8 x 131072", topk(2048), (f32(8, 2**17), i32(8)), MIB),
    Case(
        "masked_topk, chosen by the dispatcher under vmap",
        jax.vmap(lambda scores: masked_topk(scores, k=512)),
        (f32(4, 8, 2**14),),
        MIB,
    ),
    Case(
        "gather_attention, decode, 8 x 1M entries",
        attention,
        (*window(8, 1, 128), u8(8, 2**20, 256), u8(8, 2**20, 32), i32(8, 1, 512)),
        MIB,
    ),
    Case(
        "gather_attention, prefill, 256 queries of 65536 entries",
        attention,
        (*window(1, 256, 384), u8(1, 2**16, 256), u8(1, 2**16, 32), i32(1, 256, 512)),
        MIB,
    ),
    Case("gather_attention, no entries", attention, window(8, 1, 129), MIB),
    index(1, 1, 2**20),
    index(8, 1, 2**20),
    index(32, 1, 2**16),
    index(8, 1, 2**20, block_size=8),
    index(1, 2048, 2**16, block_size=8),
    pool(8, 1, 2**20, 2048),
    pool(1, 256, 2**20, 2048),
    entries((4096,), 512, "fp8_e8m0_32", rotated=True),
    entries((4096,), 512, "fp4_e4m3_16", rotated=True),
    entries((4096,), 128, "fp4_e8m0_32"),
    decoded((4096,), 512, "fp8_e8m0_32"),
    decoded((4096,), 512, "fp4_e4m3_16"),
    decoded((4096,), 128, "fp4_e8m0_32"),
    matmul(6, 1, 384, 2304, 5120, "fp4_e8m0_32"),
    matmul(48, 1, 384, 2304, 5120, "fp4_e8m0_32"),
    matmul(48, 1, 384, 5120, 2304, "fp4_e8m0_32"),
    # x with its channels in another order, and what it passes through on the way; weights are 4.5 GB
    matmul(384, 128, 384, 2304, 5120, "fp4_e8m0_32", 2 * 384 * 128 * 5120 * 2 + MIB),
    matmul(1, 1, 1, 32768, 1280, "fp8_e8m0_32x32"),
]


def compile_for(topology: str, fn: Callable, shapes):
    """Compiles fn(*shapes) for one chip of a topology."""
    chips = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    one_chip = NamedSharding(Mesh(np.array(chips[:1]), ("chip",)), PartitionSpec())
    placed = [jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=one_chip) for s in shapes]
    return jax.jit(fn, in_shardings=one_chip, out_shardings=one_chip).lower(*placed).compile()


def calls(compiled) -> set[str]:
    """What a compiled program calls; no program here may call the host."""
    program = compiled.as_text()
    called = set(re.findall(r'custom_call_target="([^"]+)"', program))
    assert not [name for name in called if "callback" in name] and "is_host_transfer=true" not in program
    return called


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_kernel_compiles_fast_with_small_temporaries(case, topology, x64):
    start = time.process_time()  # of all threads, whatever else the machine does
    with jax.enable_x64(x64):
        compiled = compile_for(topology, case.fn, case.shapes)
    assert time.process_time() - start < COMPILE_SECONDS
    assert "tpu_custom_call" in calls(compiled)
    assert compiled.memory_analysis().temp_size_in_bytes <= case.temporary_bytes


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("format,channels", [("fp8_e8m0_32", 512), ("fp4_e4m3_16", 512), ("fp4_e8m0_32", 128)])
def test_one_row_is_left_to_xla(topology, format, channels):
    there = functools.partial(quantize, format=format)
    x, angle = bf16(1, channels), f32(1, 32)
    quantized = compile_for(topology, lambda x, *rotation: there(x, rotation), (x, angle, angle))
    back = functools.partial(dequantize, format=format, dtype=jnp.bfloat16)
    decoded = compile_for(topology, back, jax.eval_shape(there, x))
    for compiled in (quantized, decoded):
        assert "tpu_custom_call" not in calls(compiled)
        assert compiled.memory_analysis().temp_size_in_bytes <= MIB
