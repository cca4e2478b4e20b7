"""Sparse gather-attention for Hopper: fetch packed rows, expand them to bf16 in shared memory, attend with wgmma.

One thread block of four warpgroups serves one query, or one of several ranges of its rows where queries are few. Rows
come in chunks of 64, window rows first; two chunks of 64 KB lie in shared memory at a time, swizzled for wgmma.

- The fetcher: each lane reads its row's index, then 64 to 128 bytes of that row's codes, expands them by integer
  arithmetic and stores bf16; the bytes of its next load are under way meanwhile. A missing row is written as zeros, so
  that what lies behind it cannot spread, and its bias, which is added to scores, as -inf.
- The scorer: scores of 64 heads x 64 rows, the running maximum and sum of an online softmax in base 2 that starts from
  the sink (maximum = sink, sum = 1, output = 0: a query without rows gets exactly 0), weights in bf16.
- Two weighers: half the channels each, output = output * shrink + weights @ rows, a chunk behind the scorer.

Ranges of one query end in unnormalised sums with their maxima and totals; plain JAX merges them.

Bytes a query: 64 KB of query, 64 KB of output, 528 a window row, 288 an entry. FLOP: 4 * 64 * 512 a row.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gather_attention import hopper_rows
from pallas_kernels.gather_attention.hopper_rows import CHANNELS, CHUNK, HEADS, PACKINGS, QUARTER, SWIZZLED

TUNING = {
    "hopper": {
        "registers": {"fetch": 96, "score": 96, "weigh": 160},  # a lane; 512 in all, the weighers count twice
        "blocks": 132,  # thread blocks to aim at: an SM holds one
    }
}

SLOTS = 2  # chunks of rows in shared memory
LOG2E = math.log2(math.e)
HEAD = plgpu.Layout.WGMMA.reduce(1)
ROW = plgpu.Layout.WGMMA.reduce(0)


def gather_attention(
    query_BTNH, sink_N, window, window_index_BTW, entries, entry_index_BTK, *, scale, window_format, entry_format
):
    """See the contract."""
    batch, tokens, heads, channels = query_BTNH.shape
    if query_BTNH.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the query is {query_BTNH.dtype.name}; this kernel multiplies bfloat16")
    if (heads, channels) != (HEADS, CHANNELS):
        raise NotImplementedError(f"{heads} heads of {channels} channels; this kernel has {HEADS} of {CHANNELS}")
    parts = [(window, window_index_BTW, window_format)]
    if entries is not None:
        parts.append((entries, entry_index_BTK, entry_format))
    for _, _, format in parts:
        if format not in PACKINGS:
            raise NotImplementedError(f"rows of format {format}; this kernel expands {', '.join(PACKINGS)}")
    queries = batch * tokens
    parts = [
        (PACKINGS[format], *planes, index.reshape(queries, index.shape[2]))
        for planes, index, format in parts
        if planes[0].shape[1] and index.shape[2]  # a plane of no rows has nothing to read
    ]
    if not queries or not parts:
        return jnp.zeros_like(query_BTNH)
    out = _attend(query_BTNH.reshape(queries, heads, channels), sink_N, parts, tokens, scale)
    return out.reshape(query_BTNH.shape)


def _attend(query_QNH, sink_N, parts, tokens, scale):
    """Attends each query to the rows of all parts (packing, codes, scales, index)."""
    queries = query_QNH.shape[0]
    blocks = TUNING["hopper"]["blocks"]
    chunks = [-(-index.shape[1] // CHUNK) for *_, index in parts]
    ranges = max(1, min(sum(chunks), blocks // queries))
    if ranges == 1:
        out_type = [jax.ShapeDtypeStruct(query_QNH.shape, jnp.bfloat16)]
    else:
        statistic = jax.ShapeDtypeStruct((ranges, queries, HEADS), jnp.float32)
        out_type = [jax.ShapeDtypeStruct((ranges, *query_QNH.shape), jnp.float32), statistic, statistic]
    result = plgpu.kernel(
        functools.partial(
            _body, packings=[packing for packing, *_ in parts], chunks=chunks, ranges=ranges, tokens=tokens, scale=scale
        ),
        out_type=out_type,
        grid=(min(queries * ranges, blocks),),
        grid_names=("block",),
        num_threads=4,
        thread_name="role",
        kernel_name="gather_attention",
        scratch_types={
            "query_smem": plgpu.SMEM((4, HEADS, QUARTER), jnp.bfloat16, transforms=SWIZZLED),
            "rows": plgpu.SMEM((SLOTS, 4, CHUNK, QUARTER), jnp.bfloat16, transforms=SWIZZLED),
            "weights": plgpu.SMEM((SLOTS, HEADS, CHUNK), jnp.bfloat16, transforms=SWIZZLED),
            "bias": plgpu.SMEM((SLOTS, CHUNK), jnp.float32),
            "shrink": plgpu.SMEM((SLOTS, HEADS), jnp.float32),
            "total": plgpu.SMEM((SLOTS, HEADS), jnp.float32),
            "sink_smem": plgpu.SMEM((HEADS,), jnp.float32),
            "query_here": plgpu.Barrier(num_arrivals=4),
            "sink_here": plgpu.Barrier(),
            "rows_here": plgpu.Barrier(num_barriers=SLOTS),
            "weights_here": plgpu.Barrier(num_barriers=SLOTS),
            "slot_free": plgpu.Barrier(num_arrivals=2, num_barriers=SLOTS),
        },
        # Safe: no warpgroup reads by itself what it wrote to shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
    )(query_QNH, sink_N.astype(jnp.float32), *(plane for _, *planes in parts for plane in planes))
    if ranges == 1:
        return result[0]
    sum_RQNH, top_RQN, total_RQN = result
    share_RQN = jnp.exp2(top_RQN - top_RQN.max(0))
    share_RQN /= (total_RQN * share_RQN).sum(0)
    return (sum_RQNH * share_RQN[..., None]).sum(0).astype(jnp.bfloat16)


def _body(query, sink, *refs, packings, chunks, ranges, tokens, scale, **scratch):
    """Gives each warpgroup of a thread block its role in all ranges of queries that the block works on, in turn."""
    planes, outs = refs[: 3 * len(packings)], refs[3 * len(packings) :]
    registers = TUNING["hopper"]["registers"]
    role = lax.axis_index("role")

    def each(work):
        items, block, blocks = query.shape[0] * ranges, lax.axis_index("block"), lax.axis_size("block")

        def step(n, done):
            item = block + n * blocks
            q, r = lax.div(item, jnp.int32(ranges)), lax.rem(item, jnp.int32(ranges))
            first, last = (lax.div(bound * jnp.int32(sum(chunks)), jnp.int32(ranges)) for bound in (r, r + 1))
            work(q, r, first, last, done)
            return done + (last - first)

        lax.fori_loop(0, lax.div(items - block + (blocks - 1), jnp.int32(blocks)), step, jnp.int32(0))

    @pl.when(role == 0)
    def _():
        plgpu.set_max_registers(registers["score"], action="decrease")
        plgpu.copy_gmem_to_smem(sink, scratch["sink_smem"], scratch["sink_here"])
        plgpu.barrier_wait(scratch["sink_here"])
        each(functools.partial(_score, query, outs[1:], scale, scratch))

    @pl.when((role == 1) | (role == 2))
    def _():
        plgpu.set_max_registers(registers["weigh"], action="increase")
        each(functools.partial(_weigh, outs[0], role - 1, scratch))

    @pl.when(role == 3)
    def _():
        plgpu.set_max_registers(registers["fetch"], action="decrease")

        def fetch(q, r, first, last, done):
            del r
            start = 0
            for part, (packing, count) in enumerate(zip(packings, chunks, strict=True)):
                lower, upper = (jnp.clip(bound - start, 0, count) for bound in (first, last))
                offset = done + start - first
                _fetch_part(planes[3 * part : 3 * part + 3], packing, scratch, q, tokens, lower, upper, offset)
                start += count

        each(fetch)


def _score(query, statistics, scale, scratch, q, r, first, last, done):
    """Makes the weights of each chunk, and the factor by which they shrink the sum so far."""
    query_smem, rows, weights, query_here = (scratch[k] for k in ("query_smem", "rows", "weights", "query_here"))
    for quarter in range(4):
        channels = pl.ds(quarter * QUARTER, QUARTER)
        plgpu.copy_gmem_to_smem(query.at[q, :, channels], query_smem.at[quarter], query_here)
    plgpu.barrier_wait(query_here)

    def step(i, carry):
        top, total = carry
        slot = lax.rem(i, jnp.int32(SLOTS))
        plgpu.barrier_wait(scratch["rows_here"].at[slot])

        def dots(acc):
            for quarter in range(4):
                plgpu.wgmma(acc, query_smem.at[quarter], rows.at[slot, quarter].transpose((1, 0)))
            return acc[...]

        scores = pl.run_scoped(dots, plgpu.ACC((HEADS, CHUNK), jnp.float32))
        bias = plgpu.layout_cast(scratch["bias"].at[slot][...], ROW)
        scores = scores * jnp.float32(scale * LOG2E) + lax.broadcast_in_dim(bias, scores.shape, [1])
        new_top = jnp.maximum(top, scores.max(axis=1))
        shrink = jnp.exp2(top - new_top)
        weight = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
        total = total * shrink + weight.sum(axis=1)
        weights.at[slot][...] = weight.astype(jnp.bfloat16)
        scratch["shrink"].at[slot][...] = shrink
        scratch["total"].at[slot][...] = total
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["weights_here"].at[slot])
        return new_top, total

    top = plgpu.layout_cast(scratch["sink_smem"][...], HEAD) * jnp.float32(LOG2E)
    one = jnp.where(r == 0, jnp.float32(1), jnp.float32(0))  # the sink counts in one range only
    total = plgpu.layout_cast(jnp.full((HEADS,), one, jnp.float32), HEAD)
    values = lax.fori_loop(done, done + (last - first), step, (top, total))
    for ref, value in zip(statistics, values, strict=bool(statistics)):
        ref.at[r, q][...] = value


def _weigh(out, half, scratch, q, r, first, last, done):
    """Sums the weighted rows of each chunk over half the channels; the output leaves through the last chunk's slot."""
    final = done + (last - first) - 1

    def step(i, carry):
        sums, _ = carry
        slot = lax.rem(i, jnp.int32(SLOTS))
        plgpu.barrier_wait(scratch["weights_here"].at[slot])
        shrink, total = (plgpu.layout_cast(scratch[name].at[slot][...], HEAD) for name in ("shrink", "total"))
        shrink = lax.broadcast_in_dim(shrink, (HEADS, QUARTER), [0])

        def add(accs):
            for quarter, acc in enumerate(accs):
                plgpu.wgmma(acc, scratch["weights"].at[slot], scratch["rows"].at[slot, 2 * half + quarter])

        sums = pl.run_state(add)([plgpu.ACC.init(x * shrink) for x in sums])

        @pl.when(i < final)
        def _():
            plgpu.barrier_arrive(scratch["slot_free"].at[slot])

        return sums, total

    zeros = plgpu.layout_cast(jnp.zeros((HEADS, QUARTER), jnp.float32), plgpu.Layout.WGMMA)
    total = plgpu.layout_cast(jnp.zeros((HEADS,), jnp.float32), HEAD)
    sums, total = lax.fori_loop(done, final + 1, step, ([zeros, zeros], total))
    slot = lax.rem(final, jnp.int32(SLOTS))
    inverse = lax.broadcast_in_dim(1 / total, (HEADS, QUARTER), [0])
    for i, x in enumerate(sums):
        quarter = 2 * half + i
        channels = pl.ds(quarter * QUARTER, QUARTER)
        if out.dtype == jnp.float32:
            out.at[r, q, :, channels][...] = x
        else:
            staged = scratch["rows"].at[slot, quarter]
            staged[...] = (x * inverse).astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(staged, out.at[q, :, channels])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    plgpu.barrier_arrive(scratch["slot_free"].at[slot])


def _fetch_part(planes, packing, scratch, q, tokens, lower, upper, offset):
    """Expands chunks `lower` to `upper` of one part; chunk i of the part is chunk `offset` + i of the block."""

    def load(i, number):
        chunk, number = i + number // packing.loads, number % packing.loads
        return hopper_rows.load_rows(planes, packing, number)(*planes, lax.div(q, jnp.int32(tokens)), q, chunk)

    def step(i, loaded):
        chunk = offset + i
        slot = lax.rem(chunk, jnp.int32(SLOTS))

        @pl.when(chunk >= SLOTS)
        def _():
            plgpu.barrier_wait(scratch["slot_free"].at[slot])

        for number in range(packing.loads):
            following = load(i, number + 1)
            hopper_rows.expand_rows(packing, number)(scratch["rows"], scratch["bias"], loaded, slot)
            loaded = following
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["rows_here"].at[slot])
        return loaded

    lax.fori_loop(lower, upper, step, load(lower, 0))
