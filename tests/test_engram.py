"""Engram: the hash to the bit, the token map, the gate."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from golden_data import GOLDEN, vectors
from jaxprs import equations, indexed_axes

from v41jax import config, engram, quant

GATE_ATOL = 1e-5  # float32: a projection of 192 channels, two norms, a sigmoid; values up to 4

flash, tiny = config.v41_flash, config.tiny


def hash_all(ids, pad, cfg, *, jit=True):
    """Rows of both tables from an empty history: [B, T, tables, rows]."""
    history = jnp.full((ids.shape[0], cfg.engram_max_ngram_size - 1), -1, jnp.int32)

    def run(ids, pad):
        return jnp.stack([engram.hash_rows(history, ids, pad, table=table, cfg=cfg) for table in (0, 1)], axis=2)

    return (jax.jit(run) if jit else run)(jnp.asarray(ids), jnp.asarray(pad, jnp.int32))


def test_constants_equal_the_release():
    golden, tables = vectors(), engram.hash_tables(flash)
    np.testing.assert_array_equal(tables.multiplier, golden["engram.multipliers"])
    np.testing.assert_array_equal(tables.prime, golden["engram.primes"])


@pytest.mark.parametrize("jit,x64", [(False, False), (True, False), (True, True)])
def test_rows_equal_the_release(jit, x64):
    golden = vectors()
    with jax.enable_x64(x64):
        rows = hash_all(golden["engram.compressed_ids"], 2, flash, jit=jit)
    assert rows.dtype == jnp.int32
    assert golden["engram.rows"].max() > 2**24  # not carried by float32
    np.testing.assert_array_equal(rows, golden["engram.rows"])


@pytest.mark.parametrize("cfg", [flash, tiny], ids=["flash", "tiny"])
def test_rows_equal_python_integers(cfg):
    rng = np.random.default_rng(0)
    largest = cfg.engram_compressed_vocab_size - 1
    ids = rng.integers(0, largest + 1, (3, 12)).astype(np.int32)
    ids[0, :4], ids[1, [3, 9]], ids[2, 0] = largest, -1, -1
    got, tables = np.asarray(hash_all(ids, 7, cfg)), engram.hash_tables(cfg)
    for b, t, table in np.ndindex(3, 12, 2):
        want = oracle.hash_rows(ids[b], t, tables.multiplier[table], tables.prime[table], 7)
        np.testing.assert_array_equal(got[b, t, table], want)
    assert (got.reshape(-1, *got.shape[2:]).max(0) < np.array(cfg.engram_num_embeddings)[:, None]).all()


@pytest.mark.parametrize("split", [(1,) * 12, (5, 7), (2, 10)])
def test_history_carries_over_calls(split):
    rng = np.random.default_rng(1)
    ids = rng.integers(-1, 400, (2, 12)).astype(np.int32)
    whole, history, start, parts = hash_all(ids, 3, tiny), np.full((2, 3), -1, np.int32), 0, []
    step = jax.jit(lambda h, ids: (engram.hash_rows(h, ids, jnp.int32(3), table=0, cfg=tiny),
                                   engram.remember(h, ids, jnp.full((2,), ids.shape[1], jnp.int32))))  # fmt: skip
    for size in split:
        rows, history = step(history, ids[:, start : start + size])
        parts.append(rows)
        start += size
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole[:, :, 0])
    np.testing.assert_array_equal(history, ids[:, -3:])


def test_remember_ignores_padding():
    history = jnp.array([[1, 2, 3]] * 4, jnp.int32)
    ids = jnp.array([[4, 5, 6, 7]] * 4, jnp.int32)
    got = engram.remember(history, ids, jnp.array([0, 1, 3, 4], jnp.int32))
    np.testing.assert_array_equal(got, [[1, 2, 3], [2, 3, 4], [4, 5, 6], [5, 6, 7]])


def test_table_sizes_must_follow_from_the_config():
    wrong = dataclasses.replace(tiny, engram_num_embeddings=(462, 631))
    with pytest.raises(ValueError, match=r"engram_num_embeddings=\[462, 631\].*makes \[462, 630\] rows"):
        engram.hash_tables(wrong)


# ---- token map


TOKENIZER = GOLDEN / "tiny-f32" / "tokenizer.json"


def test_tokens_of_equal_normal_form_share_an_id():
    from tokenizers import Tokenizer

    ids = engram.token_map(TOKENIZER, tiny)
    assert ids.dtype == np.int32
    first = [int(np.argmax(ids == i)) for i in range(406)]
    assert first == sorted(first) and set(ids) == set(range(406))  # numbered by first appearance
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    texts = [tokenizer.decode([i], skip_special_tokens=False) for i in range(512)]
    plain = {i: text for i, text in enumerate(texts) if text.isascii() and text.strip() and "\ufffd" not in text}
    keys = {i: " ".join(text.lower().replace("\t", " ").split(" ")).strip() for i, text in plain.items()}
    pairs = [(a, b) for a in keys for b in keys if a < b]
    assert sum(keys[a] == keys[b] for a, b in pairs) > 50
    assert all((keys[a] == keys[b]) == (ids[a] == ids[b]) for a, b in pairs if "\n" not in plain[a] + plain[b])


def test_ids_past_the_tokenizer_stand_for_padding():
    wide = dataclasses.replace(tiny, vocab_size=520)
    ids = engram.token_map(TOKENIZER, wide)
    np.testing.assert_array_equal(ids[512:], np.full(8, ids[2]))


@pytest.mark.parametrize(
    "changes,message",
    [
        ({"engram_compressed_vocab_size": 405}, "compresses to 406 ids.*engram_compressed_vocab_size=405"),
        ({"vocab_size": 511}, "has 512 tokens; vocab_size=511"),
    ],
)
def test_another_tokenizer_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        engram.token_map(TOKENIZER, dataclasses.replace(tiny, **changes))


def test_a_missing_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.json does not exist"):
        engram.token_map(tmp_path / "none.json", tiny)


# ---- the memory of a position


Z, D = tiny.hc_mult, tiny.hidden_size
ROWS, WIDTH = 462, 6 * tiny.engram_head_dim


def layer(rng, dtype=jnp.float32):
    table = rng.standard_normal((ROWS, tiny.engram_head_dim)).astype(np.float32)
    wkv = (rng.standard_normal(((Z + 1) * D, WIDTH)) / 8).astype(np.float32)
    q, k = (rng.standard_normal((Z, D)).astype(np.float32) for _ in "qk")
    params = {
        "embed": jax.jit(quant.quantize, static_argnums=1)(table, "fp8_e8m0_32"),
        "wkv": jnp.asarray(wkv, dtype), "q_weight": jnp.asarray(q, dtype), "k_weight": jnp.asarray(k, dtype),
    }  # fmt: skip
    return params, (oracle.quantize(table, "fp8_e8m0_32")[2], wkv, q, k)


run = jax.jit(functools.partial(engram.engram, cfg=tiny))


@pytest.mark.parametrize("x64", [False, True])
def test_engram_equals_the_oracle(x64):
    rng = np.random.default_rng(2)
    params, (table, wkv, q, k) = layer(rng)
    streams = rng.standard_normal((2, 3, Z, D)).astype(np.float32)
    rows = rng.integers(0, ROWS, (2, 3, 6)).astype(np.int32)
    with jax.enable_x64(x64):
        got = run(params, streams, rows)
    assert got.dtype == jnp.float32
    for at in np.ndindex(2, 3):
        kv = wkv.astype(np.float64) @ table[rows[at]].ravel()
        want = oracle.engram(streams[at], kv[: Z * D].reshape(Z, D), kv[Z * D :], q, k)
        np.testing.assert_allclose(got[at], want, rtol=0, atol=GATE_ATOL)


def test_empty_streams_open_the_gate_halfway():
    rng = np.random.default_rng(3)
    params, (table, wkv, _, _) = layer(rng)
    rows = np.zeros((1, 1, 6), np.int32)
    value = (wkv.astype(np.float64) @ np.tile(table[0], 6))[Z * D :]
    got = run(params, np.zeros((1, 1, Z, D), np.float32), rows)
    np.testing.assert_allclose(got[0, 0], np.tile(value / 2, (Z, 1)), rtol=0, atol=GATE_ATOL)
    gradient = jax.jit(jax.grad(lambda s: engram.engram(params, s, rows, cfg=tiny).sum()))(jnp.zeros((1, 1, Z, D)))
    assert np.isfinite(gradient).all()


def test_bfloat16_in_and_out():
    params, _ = layer(np.random.default_rng(4), jnp.bfloat16)
    streams = jax.ShapeDtypeStruct((1, 2, Z, D), jnp.bfloat16)
    rows = jax.ShapeDtypeStruct((1, 2, 6), jnp.int32)
    assert jax.eval_shape(run, params, streams, rows).dtype == jnp.bfloat16


def test_table_rows_are_gathered_by_row():
    # 384 million rows of 256 bytes: a byte index would pass 2^31, a row number does not.
    params, _ = layer(np.random.default_rng(5))
    inputs = params, jnp.ones((1, 2, Z, D)), jnp.zeros((1, 2, 6), jnp.int32)
    gathers = [
        e for e in equations(functools.partial(engram.engram, cfg=tiny), *inputs) if e.primitive.name == "gather"
    ]
    assert len(gathers) == 2  # codes and scales
    assert all(indexed_axes(e) == 1 for e in gathers)
    assert max(flash.engram_num_embeddings) < 2**31


def test_specs_store_the_table_in_fp8_and_keep_gates_in_high_precision():
    specs = engram.specs(flash, 1)
    assert specs["embed"].format == "fp8_e8m0_32"
    assert specs["embed"].shape == (384016682, 256)
    assert {name for name, spec in specs.items() if spec.format} == {"embed", "wkv"}
