"""Engram: hashed n-gram memory (architecture section 8).

Token ids map to a smaller id space; the last N ids of a position hash to table rows, one per n-gram size and head; the
rows make a key per stream, which gates a value into it. Hashes are 64-bit integers, kept as two uint32 words, so that
they are right inside and outside jit whether or not x64 is on.
"""

import functools
import pathlib
import re
import unicodedata
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import quant
from v41jax.config import Config
from v41jax.layers import project
from v41jax.tree import ArraySpec, Specs


class HashTables(NamedTuple):
    """Constants of the hash, derived from the config and the same for every checkpoint of it."""

    multiplier: np.ndarray  # i64 [layers, N]
    prime: np.ndarray  # i64 [layers, N - 1, heads]; one n-gram size and head's number of rows
    offset: np.ndarray  # i64 [layers, N - 1, heads]; where its rows start


@functools.cache
def hash_tables(cfg: Config) -> HashTables:
    """Derives multipliers, primes and offsets; refuses a config whose table sizes do not follow from them."""
    N, heads, layers = cfg.engram_max_ngram_size, cfg.engram_n_heads, cfg.engram_layer_ids
    bound = max(1, (2**63 - 1) // cfg.engram_compressed_vocab_size // 2)
    multiplier = [np.random.default_rng(10007 * i).integers(0, bound, size=N, dtype=np.int64) * 2 + 1 for i in layers]
    used, prime = set(), np.zeros((len(layers), N - 1, heads), np.int64)
    for layer, size in np.ndindex(prime.shape[:2]):
        candidate = cfg.engram_vocab_size - 1
        for head in range(heads):
            candidate += 1
            while candidate in used or not _is_prime(candidate):
                candidate += 1
            used.add(candidate)
            prime[layer, size, head] = candidate
    rows = prime.reshape(len(layers), -1)
    if tuple(rows.sum(1)) != cfg.engram_num_embeddings:
        raise ValueError(
            f"config: engram_num_embeddings={list(cfg.engram_num_embeddings)}, but engram_vocab_size="
            f"{cfg.engram_vocab_size} with {heads} heads and n-grams up to {N} makes {rows.sum(1).tolist()} rows"
        )
    return HashTables(np.stack(multiplier), prime, (np.cumsum(rows, axis=1) - rows).reshape(prime.shape))


def _is_prime(n: int) -> bool:
    return n >= 2 and all(n % d for d in range(2, int(n**0.5) + 1))


def token_map(tokenizer_file: str | pathlib.Path, cfg: Config) -> np.ndarray:
    """Maps token ids to compressed ids: tokens whose normalised text is equal share one, numbered by first appearance.

    Returns i32 [vocab_size]; ids the tokenizer does not use stand for the pad token.
    Raises ValueError where the tokenizer does not give the config's counts.
    """
    from tokenizers import Tokenizer  # only here: a model that is already converted needs no tokenizer

    if not pathlib.Path(tokenizer_file).is_file():
        raise ValueError(f"{tokenizer_file} does not exist; Engram's token map is derived from it")
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    if not cfg.engram_pad_token_id < known <= cfg.vocab_size:
        raise ValueError(
            f"{tokenizer_file} has {known} tokens; vocab_size={cfg.vocab_size} and "
            f"engram_pad_token_id={cfg.engram_pad_token_id} do not fit it"
        )
    ids = compressed_ids(tokenizer)
    out = np.full(cfg.vocab_size, ids[cfg.engram_pad_token_id], np.int32)
    out[:known] = ids
    if max(ids) + 1 != cfg.engram_compressed_vocab_size:
        raise ValueError(
            f"{tokenizer_file} compresses to {max(ids) + 1} ids, but engram_compressed_vocab_size="
            f"{cfg.engram_compressed_vocab_size}; it is not the tokenizer this model was trained with"
        )
    return out


def compressed_ids(tokenizer) -> list[int]:
    """Numbers the tokens of a tokenizer by their normalised text, in order of first appearance: one id per token."""
    seen: dict[str, int] = {}
    known = tokenizer.get_vocab_size(with_added_tokens=True)
    return [seen.setdefault(_normal_form(tokenizer, token), len(seen)) for token in range(known)]


def _normal_form(tokenizer, token: int) -> str:
    text = tokenizer.decode([token], skip_special_tokens=False)
    if "\ufffd" in text:
        return tokenizer.id_to_token(token)
    key = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    key = "".join(c for c in key if unicodedata.category(c) != "Mn").lower()
    key = re.sub(r"[ \t\r\n]+", " ", key)
    return (key if key == " " else key.strip()) or text


def specs(cfg: Config, table: int) -> Specs:
    """Describes one engram layer's weights; the table stays FP8 in every checkpoint."""
    assert hash_tables(cfg).prime[table].sum() == cfg.engram_num_embeddings[table]
    Z, D = cfg.hc_mult, cfg.hidden_size
    rows = (cfg.engram_max_ngram_size - 1) * cfg.engram_n_heads * cfg.engram_head_dim
    stream = ArraySpec(shape=(Z, D), axes=(None, "embed"), init="ones", suffix="")
    return {
        "embed": ArraySpec(
            shape=(cfg.engram_num_embeddings[table], cfg.engram_head_dim),
            axes=("engram_rows", None),
            init="unit",
            format="fp8_e8m0_32",
        ),
        "wkv": ArraySpec(shape=((Z + 1) * D, rows), axes=("embed", None), format=cfg.dense_format),
        "q_weight": stream,
        "k_weight": stream,
    }


def token_map_spec(cfg: Config) -> ArraySpec:
    """Describes the token map, kept with the parameters though no checkpoint names it."""
    return ArraySpec(
        shape=(cfg.vocab_size,),
        axes=("vocab",),
        init=lambda shape: jnp.arange(*shape, dtype=jnp.int32) % cfg.engram_compressed_vocab_size,
        dtype="int32",
        released=False,
    )


def remember(ngram_BN, id_BT, length_B):
    """Returns the history i32 [B, N - 1] after each row's `length_B` new ids [B, T]; oldest first."""
    both = jnp.concatenate([ngram_BN, id_BT], axis=1)
    last = length_B[:, None] + jnp.arange(ngram_BN.shape[1], dtype=jnp.int32)
    return jnp.take_along_axis(both, last, axis=1)


def hash_rows(ngram_BN, id_BT, pad_id, *, table: int, cfg: Config, reach_BT=None):
    """Hashes the n-grams that end at each position to table rows.

    Args:
      ngram_BN: i32 [B, N - 1], ids before this call, oldest first; -1 is dead.
      id_BT: i32 compressed ids; -1 is dead (padding, image span).
      pad_id: i32 compressed id that stands for everything from the first dead token back.
      table: which engram layer.
      reach_BT: i32, older tokens than this many back are dead; None: there is no such limit.
    Returns:
      i32 [B, T, (N - 1) * heads], n-gram sizes ascending, heads inside. Exact 64-bit arithmetic.
    Source: reference `Engram.hash`.
    """
    tables = hash_tables(cfg)
    N, T = cfg.engram_max_ngram_size, id_BT.shape[1]
    both = jnp.concatenate([ngram_BN, id_BT], axis=1)
    dead = jnp.zeros(id_BT.shape, bool)
    words = []  # of the 1-gram, 2-gram, ... that end here
    for back in range(N):
        ids = both[:, N - 1 - back : N - 1 - back + T]
        dead = dead | (ids < 0)
        if reach_BT is not None:
            dead = dead | (reach_BT < back)
        word = _multiply(jnp.where(dead, pad_id, ids).astype(jnp.uint32), int(tables.multiplier[table, back]))
        words.append(jax.tree.map(jnp.bitwise_xor, words[-1], word) if words else word)
    high_low = [jnp.stack(parts, axis=-1)[..., None] for parts in zip(*words[1:], strict=True)]
    rows = _modulo(high_low, tables.prime[table]) + tables.offset[table].astype(np.int32)
    return rows.reshape(*id_BT.shape, -1)


def _multiply(a, constant: int):
    """uint32 times a constant below 2^63 as words (high, low); the product must be below 2^64."""
    high, low = np.uint32(constant >> 32), constant & 0xFFFFFFFF
    half = jnp.uint32(0xFFFF)
    a1, a0, b1, b0 = a >> 16, a & half, np.uint32(low >> 16), np.uint32(low & 0xFFFF)
    p00, p01, p10 = a0 * b0, a0 * b1, a1 * b0
    middle = (p00 >> 16) + (p01 & half) + (p10 & half)
    carry = a1 * b1 + (p01 >> 16) + (p10 >> 16) + (middle >> 16)
    return carry + a * high, (p00 & half) | middle << 16


def _modulo(high_low, prime: np.ndarray):
    """Words (high, low) modulo primes, i32, broadcast: long division, as many bits a step as fit 32."""
    step = next(bits for bits in (8, 4, 2, 1) if int(prime.max()).bit_length() + bits <= 32)
    divisor = prime.astype(np.uint32)
    rest = jnp.zeros((), jnp.uint32)
    for part in high_low:
        for shift in range(32 - step, -1, -step):
            digit = (part >> shift) & jnp.uint32((1 << step) - 1)
            rest = (rest << step | digit) % divisor
    return rest.astype(jnp.int32)


def engram(params, streams_BTZD, row_BTR, *, cfg: Config):
    """Adds each position's n-gram memory to its streams.

    Args:
      streams_BTZD: streams that enter the layer.
      row_BTR: i32 table rows from `hash_rows`.
    Returns:
      [B, T, Z, D] in the streams' dtype; gates in float32.
    Source: report 2.4; reference `Engram.forward`.
    """
    Z, D, eps = cfg.hc_mult, cfg.hidden_size, jnp.float32(cfg.rms_norm_eps)
    rows = jax.tree.map(lambda plane: plane[row_BTR], params["embed"])
    memory = quant.dequantize(rows, streams_BTZD.dtype)
    memory = memory.reshape(*memory.shape[:2], -1)
    kv = project(memory, params["wkv"], activation=cfg.formats.activation, dtype=jnp.float32)
    key, value = kv[..., : Z * D].reshape(*kv.shape[:2], Z, D), kv[..., Z * D :]
    streams = streams_BTZD.astype(jnp.float32)
    weight = params["q_weight"].astype(jnp.float32) * params["k_weight"].astype(jnp.float32)

    def rms(x):
        return jnp.sqrt(jnp.mean(jnp.square(x), axis=-1) + eps)

    dot = jnp.sum(streams * weight * key, axis=-1) / (rms(streams) * rms(key)) * jnp.float32(D**-0.5)
    gate = jax.nn.sigmoid(jnp.sign(dot) * jnp.sqrt(jnp.maximum(jnp.abs(dot), jnp.float32(1e-6))))
    return (streams + gate[..., None] * value[:, :, None]).astype(streams_BTZD.dtype)
