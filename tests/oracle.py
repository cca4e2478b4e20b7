"""The definitions as NumPy loops, one query, one block, one token at a time.

Written from the specification; imports neither v41jax nor pallas_kernels. Float64, except where bits matter: those
functions say float32 and mean it.
"""

import math

import ml_dtypes
import numpy as np

# ---- number formats (section 4)

BYTES = np.arange(256, dtype=np.uint8)
E2M1 = BYTES[:16].view(ml_dtypes.float4_e2m1fn).astype(np.float32)
E4M3 = BYTES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
E8M0 = BYTES.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)

FORMATS = {  # element table, codes without a sign, scale format, group, floor of amax
    "fp8_e8m0_32": (E4M3, 127, "e8m0", 32, np.float32(1e-4)),
    "fp4_e8m0_32": (E2M1, 8, "e8m0", 32, np.float32(6 * 2.0**-126)),
    "fp4_e4m3_16": (E2M1, 8, "e4m3", 16, np.float32(6 * 2.0**-9)),
    "fp8_e8m0_32x32": (E4M3, 127, "e8m0", 32, np.float32(1e-4)),
}


def encode(values, table):
    """Rounds finite values to the nearest code of E2M1 or E4M3; ties to the even code, clipped; the sign is kept."""
    unsigned = 8 if len(table) == 16 else 127
    sizes = table[:unsigned].astype(np.float64)
    codes = np.zeros(np.shape(values), np.uint8)
    for i in np.ndindex(codes.shape):
        distance = np.abs(sizes - min(abs(float(values[i])), sizes[-1]))
        nearest = np.flatnonzero(distance == distance.min())
        code = min(nearest, key=lambda c: c % 2)
        codes[i] = code + (len(table) // 2 if np.signbit(values[i]) else 0)
    return codes


def e8m0_ceil(amax, largest):
    """The byte of 2^ceil(log2(amax / largest)); the division is a float32 one."""
    mantissa, exponent = math.frexp(float(np.float32(amax) / np.float32(largest)))
    return exponent - (mantissa == 0.5) + 127


def quantize_group(values, format):
    """Quantises float32 values that share one scale: codes, scale byte, decoded values."""
    table, unsigned, scale_format, _, floor = FORMATS[format]
    largest = table[unsigned - 1]
    amax = np.maximum(np.abs(values).max(), floor)
    if scale_format == "e8m0":
        byte = e8m0_ceil(amax, largest)
        scale = E8M0[byte]
    else:
        byte = encode(np.array([amax / largest], np.float32), E4M3)[0]
        scale = E4M3[byte]
    codes = encode(values / scale, table)
    return codes, byte, table[codes] * scale


def quantize(x, format):
    """Quantises float32 [rows, n] group by group: codes [rows, n] (a nibble a byte), scale bytes, decoded values."""
    group = FORMATS[format][3]
    tall = group if format.endswith("32x32") else 1
    rows, width = x.shape
    codes, decoded = np.zeros(x.shape, np.uint8), np.zeros(x.shape, np.float32)
    scales = np.zeros((-(-rows // tall), -(-width // group)), np.uint8)
    for r, g in np.ndindex(scales.shape):
        block = slice(r * tall, (r + 1) * tall), slice(g * group, (g + 1) * group)
        codes[block], scales[r, g], decoded[block] = quantize_group(x[block], format)
    return codes, scales, decoded


def pack(codes):
    """Two 4-bit codes a byte, the even channel in the low nibble."""
    packed = np.zeros((*codes.shape[:-1], codes.shape[-1] // 2), np.uint8)
    for i in np.ndindex(packed.shape):
        packed[i] = codes[(*i[:-1], 2 * i[-1])] + 16 * codes[(*i[:-1], 2 * i[-1] + 1)]
    return packed


# ---- selection (section 5)


def block_max(scores_BTS, visible_BT, block_size):
    """The best visible score of each block; NaN counts as -inf."""
    B, T, S = scores_BTS.shape
    best_BTM = np.full((B, T, -(-S // block_size)), -np.inf, np.float32)
    for b, t, m in np.ndindex(best_BTM.shape):
        for s in range(m * block_size, min((m + 1) * block_size, visible_BT[b, t], S)):
            if scores_BTS[b, t, s] > best_BTM[b, t, m]:
                best_BTM[b, t, m] = scores_BTS[b, t, s]
    return best_BTM


def top_k(scores_S, k):
    """The k best positions of one query, ascending, -1 behind them; equal scores: the lower; never -inf or NaN."""
    allowed = [s for s in range(len(scores_S)) if scores_S[s] > -np.inf]
    best = sorted(allowed, key=lambda s: (-scores_S[s], s))[:k]
    return sorted(best) + [-1] * (k - len(best))


def candidate_blocks(scores_S, visible, block_size, keep):
    """The blocks one query keeps, ascending: the one of its newest visible entry, then the best."""
    best = block_max(scores_S[None, None], np.array([[visible]]), block_size)[0, 0]
    if visible > 0:
        best[(visible - 1) // block_size] = np.inf
    return [m for m in top_k(best, keep) if m >= 0]


def pool_mask(blocks, visible, block_size, entries):
    """The candidate pool as a mask: the visible entries of the kept blocks."""
    return np.array([s < visible and s // block_size in blocks for s in range(entries)])


def index_scores(query_TIJ, weight_TI, key_SJ):
    """Sum over heads of weight x relu(query . key)."""
    scores = np.zeros((len(query_TIJ), len(key_SJ)))
    for t, s in np.ndindex(scores.shape):
        for i in range(weight_TI.shape[1]):
            dot = np.dot(query_TIJ[t, i].astype(np.float64), key_SJ[s].astype(np.float64))
            scores[t, s] += float(weight_TI[t, i]) * max(dot, 0.0)
    return scores


# ---- attention, compressor (section 5)


def rms_norm(x, weight, eps=1e-20):
    """One vector over its root mean square."""
    x = np.asarray(x, np.float64)
    return x / math.sqrt(np.mean(x * x) + eps) * np.asarray(weight, np.float64)


def sink_attention(query_NH, rows, sink_N, scale):
    """One query over a list of rows [H]; the sink joins the denominator only."""
    out = np.zeros(query_NH.shape)
    for n in range(len(query_NH)):
        scores = [scale * np.dot(query_NH[n].astype(np.float64), np.asarray(row, np.float64)) for row in rows]
        top = max([*scores, float(sink_N[n])])
        total = sum(math.exp(s - top) for s in scores) + math.exp(float(sink_N[n]) - top)
        for s, row in zip(scores, rows, strict=True):
            out[n] += math.exp(s - top) / total * np.asarray(row, np.float64)
    return out


def window_positions(position, window, first=0):
    """The positions whose window rows a query sees, its own the last."""
    return [p for p in range(position - window + 1, position + 1) if p >= max(first, 0)]


def pool_group(kv_mH, gate_mH):
    """One entry from the m tokens of a group: softmax over the gates, channel by channel; not normalised."""
    entry = np.zeros(kv_mH.shape[1])
    for h in range(kv_mH.shape[1]):
        weights = [math.exp(float(g) - float(gate_mH[:, h].max())) for g in gate_mH[:, h]]
        entry[h] = sum(w * float(v) for w, v in zip(weights, kv_mH[:, h], strict=True)) / sum(weights)
    return entry


# ---- RoPE (section 3)


def frequencies(theta, channels, yarn=None):
    """Radians a position, rounded step by step as section 3 says; yarn = (factor, beta_fast, beta_slow, original)."""
    out = []
    for j in range(channels // 2):
        exponent = np.float32(2 * j) / np.float32(channels)
        f = np.float32(1) / np.float32(float(theta) ** float(exponent))
        if yarn is not None:
            factor, fast, slow, original = yarn
            low, high = (
                channels * math.log(original / (2 * math.pi * r)) / (2 * math.log(theta)) for r in (fast, slow)
            )
            low, high = max(math.floor(low), 0), min(math.ceil(high), channels - 1)
            ramp = np.float32(min(max((j - low) / max(high - low, 1e-3), 0), 1))
            f = f / np.float32(factor) * ramp + f * (np.float32(1) - ramp)
        out.append(f)
    return np.array(out, np.float32)


def rotate(x, position, frequency, inverse=False):
    """Rotates the adjacent pairs of one vector's last channels as complex numbers; the angle is a float32 product."""
    out = np.array(x, np.float64)
    start = len(out) - 2 * len(frequency)
    for j, f in enumerate(frequency):
        angle = float(np.float32(position) * f)
        even, odd = start + 2 * j, start + 2 * j + 1
        turned = complex(out[even], out[odd]) * complex(math.cos(angle), (-1) ** inverse * math.sin(angle))
        out[even], out[odd] = turned.real, turned.imag
    return out


# ---- mHC (section 2)


def sigmoid(x):
    """Without overflow."""
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


def split_mixes(logits, scale, base, streams, iterations, eps):
    """pre [Z], post [Z] and the Sinkhorn iterate comb [Z, Z] of one token."""
    Z = streams
    scaled = [float(m) * float(scale[min(i // Z, 2)]) + float(base[i]) for i, m in enumerate(logits)]
    pre = [sigmoid(m) + eps for m in scaled[:Z]]
    post = [2 * sigmoid(m) for m in scaled[Z : 2 * Z]]
    comb = np.array(scaled[2 * Z :]).reshape(Z, Z)
    for j in range(Z):
        e = np.exp(comb[j] - comb[j].max())
        comb[j] = e / e.sum() + eps
    for iteration in range(iterations):
        if iteration > 0:
            for j in range(Z):
                comb[j] /= comb[j].sum() + eps
        for k in range(Z):
            comb[:, k] /= comb[:, k].sum() + eps
    return np.array(pre), np.array(post), comb


def collapse(pre_Z, streams_ZD):
    """The weighted sum of the streams."""
    return sum(float(p) * s.astype(np.float64) for p, s in zip(pre_Z, streams_ZD, strict=True))


def expand(post_Z, comb_ZZ, y_D, streams_ZD):
    """Stream k becomes post_k y + sum over j of comb[j, k] stream_j."""
    out = np.zeros(streams_ZD.shape)
    for k in range(len(out)):
        out[k] = float(post_Z[k]) * y_D.astype(np.float64)
        for j in range(len(out)):
            out[k] += float(comb_ZZ[j, k]) * streams_ZD[j].astype(np.float64)
    return out


# ---- MoE (section 7)


def route(logits_E, bias_E, top, *, scoring="sqrtsoftplus", normalize=True, factor=1.5):
    """One token's experts, best first, and their weights."""
    logits = [float(x) for x in logits_E]
    if scoring == "sqrtsoftplus":
        scores = [math.sqrt(math.log1p(math.exp(-abs(x))) + max(x, 0.0)) for x in logits]
    elif scoring == "sigmoid":
        scores = [sigmoid(x) for x in logits]
    else:
        exps = [math.exp(x - max(logits)) for x in logits]
        scores = [e / sum(exps) for e in exps]
    chosen = sorted(range(len(scores)), key=lambda e: (-(scores[e] + float(bias_E[e])), e))[:top]
    weights = [scores[e] for e in chosen]
    if top > 1 and normalize:
        weights = [w / (sum(weights) + 1e-20) for w in weights]
    return chosen, [w * factor for w in weights]


def expert(x_D, w1, w2, w3, weight, limit):
    """SwiGLU of one token in one expert."""
    x = x_D.astype(np.float64)
    gate, up = w1 @ x, w3 @ x
    if limit > 0:
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    hidden = [g * sigmoid(g) * u * weight for g, u in zip(gate, up, strict=True)]
    return w2 @ np.array(hidden)


def moe(x_TD, gate_weight, bias, routed, shared, *, top, limit):
    """Token by token, expert by expert; `routed` is a list of (w1, w2, w3), `shared` one of them."""
    out = np.zeros(x_TD.shape)
    for t, x in enumerate(x_TD):
        chosen, weights = route(gate_weight.astype(np.float64) @ x.astype(np.float64), bias, top)
        out[t] = expert(x, *shared, 1.0, limit)
        for e, weight in zip(chosen, weights, strict=True):
            out[t] += expert(x, *routed[e], weight, limit)
    return out


# ---- Engram (section 8)


def hash_rows(ids, position, multipliers, primes, pad):
    """One position's table rows in Python integers; `ids` is the sequence so far, -1 where dead.

    multipliers [N], primes [N - 1, heads] of one layer.
    """
    looked, dead = [], False
    for back in range(len(multipliers)):
        dead = dead or position - back < 0 or ids[position - back] < 0
        looked.append(pad if dead else int(ids[position - back]))
    word, rows, offset = looked[0] * int(multipliers[0]), [], 0
    for back in range(1, len(multipliers)):
        word ^= looked[back] * int(multipliers[back])
        for prime in primes[back - 1]:
            rows.append(word % int(prime) + offset)
            offset += int(prime)
    return rows


def engram(streams_ZD, key_ZD, value_D, q_weight, k_weight, eps=1e-20):
    """One position: each stream's gate and what it adds."""
    out = np.zeros(streams_ZD.shape)
    for z in range(len(out)):
        h, k = streams_ZD[z].astype(np.float64), np.asarray(key_ZD[z], np.float64)
        size = math.sqrt(np.mean(h * h) + eps) * math.sqrt(np.mean(k * k) + eps)
        dot = np.sum(h * q_weight[z] * k_weight[z] * k) / size / math.sqrt(len(h))
        gate = sigmoid(np.sign(dot) * math.sqrt(max(abs(dot), 1e-6)))
        out[z] = h + gate * np.asarray(value_D, np.float64)
    return out
