"""Exact top-k for Hopper: a radix select of the k-th key in registers, over a pyramid of block maxima if rows are wide.

One thread block owns a row. Every lane holds up to 32 keys in registers: the score's bits as an int32 that orders like
the score (-0 made +0; NaN, -inf and what lies past the length made the least int32). Four times, eight bits at a time
from the top, the lanes count the digits of the keys that share the prefix found so far (atomics in shared memory), and
each warp finds the digit in which the k-th greatest key lies by a prefix sum over the 256 counts. That ends with the
k-th key itself and with how many keys equal to it are wanted: the lowest positions. A last prefix sum over the flags
"greater" and "equal", in order of position, gives each chosen position its place in the output. Nothing is sorted, and
counts do not depend on the order of the atomics, so a call repeats to the bit.

A row wider than one thread block holds is searched by levels: the k best entries lie in the k blocks of greatest
maximum (ties to the lower block; k other blocks would hold k better entries otherwise). So the kernel chooses k blocks
by their maxima, then looks into those blocks only; positions ascend with blocks, so ties stay right. The maxima are a
plain XLA reduction, the one pass over all scores.

Bytes: S floats a row read once, S / block maxima written and read once, k blocks read again, k int32 written. About 30
integer operations a key, no FLOP. A narrow row (S up to 32768) reads only what its length covers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes
from pallas_kernels.lanes import QUAD, WARP, WARPGROUP

TUNING = {
    "hopper": {
        "keys": 32768,  # of one row in one thread block's registers
        "keys_a_lane": 8,  # that make another warpgroup worth its barriers
        "warpgroups": 4,  # where the keys fit: two thread blocks share an SM then
        "chunk": 8,  # keys of a lane that one step ranks
    }
}

PARTS, ROUNDS = 256, 6  # of a count; a key takes four rounds, the positions of equal keys two
MOST = 32  # keys a lane can hold
NEVER = np.int32(-(2**31))  # the key of what is never chosen
MINUS_ZERO = NEVER  # bits of -0
UNREACHED = np.int32(2**30)  # more than any count


def masked_topk(scores_RS, length_R, *, k: int):
    """See the contract; rows R flattened, S at least 1."""
    rows, width = scores_RS.shape
    tuning = TUNING["hopper"]
    if scores_RS.dtype != jnp.float32:
        raise NotImplementedError(f"the scores are {scores_RS.dtype.name}; this kernel reads float32")
    wanted = min(k, width)
    blocks = _blocks(width, wanted, tuning["keys"])
    if rows == 0:
        return jnp.full((rows, k), -1, jnp.int32)
    length_R = length_R.astype(jnp.int32)
    levels = [scores_RS]
    for block in blocks:
        levels.append(_block_max(levels[-1], length_R if len(levels) == 1 else None, block))
    chosen_RK = _descend(levels, length_R, wanted, blocks, tuning)
    return jnp.pad(chosen_RK, [(0, 0), (0, k - wanted)], constant_values=-1)


def _blocks(width: int, k: int, keys: int) -> list[int]:
    """Entries a block from the scores upwards, until the blocks of a row fit in one thread block."""
    blocks = []
    while width > keys:
        fit = [b for b in (1 << i for i in range(2, 31)) if k * b <= keys]
        if not fit:
            raise NotImplementedError(
                f"k={k} of {width}: blocks of {QUAD} make {k * QUAD} keys; {keys} fit in registers"
            )
        block = min(fit, key=lambda b: max(-(-width // b) - keys, 0) * keys + -(-width // b) + k * b)
        blocks.append(block)
        width = -(-width // block)
    return blocks


def _block_max(scores_RS, length_R, block: int):
    """Maxima of blocks of a row; -inf for NaN and past the length."""
    if length_R is not None:
        seen = jnp.arange(scores_RS.shape[1], dtype=jnp.int32) < length_R[:, None]
        scores_RS = jnp.where(seen & ~jnp.isnan(scores_RS), scores_RS, -jnp.inf)
    padded = jnp.pad(scores_RS, [(0, 0), (0, -scores_RS.shape[1] % block)], constant_values=-jnp.inf)
    return padded.reshape(len(padded), -1, block).max(-1)


def _descend(levels, length_R, k, blocks, tuning):
    """Chooses k of the coarsest level, then k of what the choice covers one level below, down to the scores."""
    rows = len(length_R)
    keys = [levels[-1].shape[1], *(k * block for block in reversed(blocks))]
    worth = WARPGROUP * tuning["keys_a_lane"]
    warpgroups = max(min(-(-max(keys) // worth), tuning["warpgroups"]), -(-max(keys) // (WARPGROUP * MOST)))

    def body(*refs):
        *levels_gmem, length_gmem, out_gmem, chosen, other, counts, totals = refs
        row = lax.axis_index("row")
        length = jnp.clip(length_gmem[row], 0, levels[0].shape[1])
        _choose(
            levels_gmem[-1].at[row],
            jnp.int32(levels[-1].shape[1]) if blocks else length,
            chosen if blocks else out_gmem.at[row],
            counts,
            totals,
            k=k,
            keys=keys[0],
            warpgroups=warpgroups,
            chunk=tuning["chunk"],
        )
        for level in reversed(range(len(blocks))):
            _choose(
                levels_gmem[level].at[row],
                jnp.int32(levels[level].shape[1]) if level else length,
                other if level else out_gmem.at[row],
                counts,
                totals,
                chosen,
                k=k,
                keys=k * blocks[level],
                block=blocks[level],
                warpgroups=warpgroups,
                chunk=tuning["chunk"],
            )
            chosen, other = other, chosen

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, k), jnp.int32),
        grid=(rows,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((k if blocks else 1,), jnp.int32),
            plgpu.SMEM((k if len(blocks) > 1 else 1,), jnp.int32),
            plgpu.SMEM((ROUNDS * PARTS,), jnp.int32),
            plgpu.SMEM((3 * WARP,), jnp.int32),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(*levels, length_R)


def _choose(scores, limit, out, counts, totals, chosen=None, *, k, keys, block=1, warpgroups, chunk):
    """Writes the k best positions of a row, or of its `chosen` blocks, ascending, then -1."""
    threads = WARPGROUP * warpgroups
    a_lane = -(-keys // (threads * QUAD)) * QUAD
    chunk = min(a_lane, chunk)
    chunks = -(-a_lane // chunk)
    thread = lanes.thread()
    lane, warp, warps = thread % WARP, thread // WARP, threads // WARP

    for i in range(-(-ROUNDS * PARTS // threads)):
        at = thread + i * threads
        lanes.store(counts, jnp.where(at < ROUNDS * PARTS, at, -1), jnp.int32(0))
    lanes.sync()  # also shows `chosen` to every lane

    slots = limit if chosen is None else jnp.int32(k * block)
    share = (slots + (warps * WARP * QUAD - 1)) // (warps * WARP * QUAD) * (WARP * QUAD)
    stop = jnp.minimum((warp + 1) * share, slots)

    def slot(c):
        """Numbers of the keys in chunk c, which is next to the warp's chunk c + 1; positions ascend with them."""
        return lanes.slots(chunk, QUAD) + (warp * share + c * WARP * chunk)

    def positions(c):
        """The row's positions of chunk c; negative where there is none."""
        if chosen is None:
            return jnp.where(slot(c) < stop, slot(c), -1)
        holder = jnp.where(slot(c) < stop, slot(c) >> (block.bit_length() - 1), -1)
        position = lanes.load(chosen, holder, "shared") * block + (slot(c) & (block - 1))
        return jnp.where(position < limit, position, -1)

    where = [positions(c) for c in range(chunks)]
    mode = "quad" if scores.shape[0] % QUAD == 0 else "each"
    keys_held = [_key(lanes.load(scores, position, mode), position >= 0) for position in where]

    # k lanes, or parts of lanes, that each hold a key of `floor` or more: so the k-th key is no less.
    tops = functools.reduce(jnp.maximum, keys_held)
    parts = -(-k // threads)
    floor = lanes.warp_reduce("min", lanes.lane_max(tops, parts)) if parts <= chunk else NEVER
    lanes.store(totals, jnp.where(lane == 0, warp, -1), floor)
    lanes.store(totals, jnp.where(lane == 0, warp + WARP, -1), lanes.warp_reduce("max", tops))
    lanes.sync()
    floor = jnp.maximum(lanes.warp_reduce("min", lanes.load(totals, lane % warps, "each")), NEVER + 1)
    top = jnp.maximum(lanes.warp_reduce("max", lanes.load(totals, lane % warps + WARP, "each")), floor)

    below = [top - key for key in keys_held]  # unsigned; more than top - floor for NEVER
    step, near, left = _nearest(below, top - floor, jnp.int32(k), counts, jnp.int32(0))
    tied = [jnp.where(distance == near, slot(c), -1) for c, distance in enumerate(below)]
    _, cut, _ = _nearest(tied, jnp.where(left == 0, 0, warps * share), left, counts, step)

    flags = [(_under(b, near) | _under(tie, cut)).astype(jnp.int32) for b, tie in zip(below, tied, strict=True)]
    count = lanes.warp_reduce("add", functools.reduce(jnp.add, flags))
    lanes.store(totals, jnp.where(lane == 0, warp + 2 * WARP, -1), count)
    lanes.sync()
    of_warp = jnp.where(lane < warps, lanes.load(totals, lane % warps + 2 * WARP, "each"), 0)
    found = lanes.warp_reduce("add", of_warp)
    before = lanes.warp_reduce("add", jnp.where(lane < warp, of_warp, 0))

    for c, flag in enumerate(flags):
        rank = lanes.warp_ranks(flag, before)
        before = before + lanes.warp_reduce("add", flag)
        lanes.store(out, jnp.where(flag != 0, rank, -1), positions(c))
    for i in range(-(-k // threads)):
        at = thread + i * threads
        lanes.store(out, jnp.where((at >= found) & (at < k), at, -1), jnp.int32(-1))


def _nearest(distances, span, wanted, counts, step):
    """Finds `near` such that every distance below it, and `left` more of those at it, are the `wanted` least.

    Distances are unsigned; those over the span do not count. Each round counts them in 256 parts of what is left of
    the span and keeps the part in which the last wanted one lies. Fewer than wanted: near exceeds the span.
    """

    def narrow(state):
        step, near, span, left = state
        shift = jnp.maximum(24 - lanes.leading_zeros(span), 0)
        for distance in distances:
            lanes.count(counts, distance - near, span, shift, step * PARTS)
        lanes.sync()
        sums = lanes.warp_cumsum(lanes.load(counts, lanes.slots(8, 8) + step * PARTS, "quad"), 8)
        short = sums < left
        skipped = lanes.warp_reduce("add", short.astype(jnp.int32))
        through = lanes.warp_reduce("min", jnp.where(sums >= left, sums, UNREACHED))
        few, whole = skipped == PARTS, through == left
        rest = left - lanes.warp_reduce("max", jnp.where(short, sums, 0))
        last = (1 << shift) - 1
        part = jnp.where(skipped < lax.shift_right_logical(span, shift), last, span & last)
        start = near + (skipped << shift)
        near = jnp.where(few, near + span + 1, jnp.where(whole, start + part + 1, start))
        return step + 1, near, jnp.where(few | whole, 0, part), jnp.where(few | whole, 0, rest)

    start = step, jnp.int32(0), span, wanted
    step, near, _, left = lax.while_loop(lambda state: state[2] != 0, narrow, start)
    return step, near, left


def _key(bits, inside):
    """int32 that order like the floats of these bits; NEVER for NaN, -inf and what is not inside."""
    score = lax.bitcast_convert_type(bits, jnp.float32)
    bits = jnp.where(bits != MINUS_ZERO, bits, 0)
    return jnp.where(inside & (score > -jnp.inf), bits ^ ((bits >> 31) & 0x7FFFFFFF), NEVER)


def _under(a, b):
    """Whether a < b as unsigned integers."""
    return (a ^ NEVER) < (b ^ NEVER)
