"""scripts/generate.py and what is behind it: tokens, stops, sampling, buckets, messages."""

import dataclasses
import json

import golden_data
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sessions
from programs import load_script

from v41jax import config, generate, inference, init_params
from v41jax.assets import BUILT_IN
from v41jax.text import RowIds, RowText, load_tokenizer

GREEDY = json.loads((golden_data.GOLDEN / "tiny-fp8fp4" / "greedy.json").read_text())  # a float64 NumPy implementation


def test_script_answers_a_ragged_batch_as_the_reference(capsys):
    ids = [f"--token-ids={','.join(map(str, case['prompt']))}" for case in GREEDY]
    assert load_script("generate").main([*ids, "--max-new-tokens", "40"]) == 0
    out, err = capsys.readouterr()
    answers = [[int(t) for t in block.split("\n")[1].split()] for block in out.split("=== prompt")[1:]]
    end = config.tiny.eos_token_id
    assert answers == [[token for token in case["answer"] if token != end] for case in GREEDY]
    for word in ("load", "compile", "prefill", "decode", "cache"):
        assert f"\n{word} " in "\n" + err


def test_one_trace_each_for_a_whole_run():
    cfg, params = sessions.MICRO, init_params(sessions.MICRO, jax.random.key(4))
    for program in (inference.run_jitted, generate._decode):  # nothing an earlier test traced
        program.clear_cache()
    before = inference.run_jitted._cache_size(), generate._decode._cache_size()
    traced = []
    original, generate.run = generate.run, lambda *a, **k: traced.append("decode") or original(*a, **k)
    prefill, inference.run = inference.run, lambda *a, **k: traced.append(k["mode"]) or original(*a, **k)
    try:
        tokens = list(generate.stream(params, [[5] * 40, [6] * 3], cfg=cfg, max_new_tokens=20, prefill_chunk=16))
    finally:
        generate.run, inference.run = original, prefill
    assert len(tokens) == 20
    assert sorted(traced) == ["decode", "exact"]  # three chunks of 16 columns, 20 steps
    assert (inference.run_jitted._cache_size(), generate._decode._cache_size()) == before


def test_chunks_have_few_widths_and_skip_the_decoder_where_exact():
    cfg = config.tiny
    prompts = [[3] * 200, [3] * 7]
    chunks = generate.plan_chunks(prompts, cfg=cfg, prefill_chunk=32)
    assert [c.tokens_BT.shape[1] for c in chunks] == [32] * 6 + [16]
    assert [int(c.lengths_B.sum()) for c in chunks] == [39] + [32] * 5 + [8]
    # The short prompt ends in the first chunk; of the long one 36 tokens must follow a chunk that skips.
    assert [c.encoder_only for c in chunks] == [False] + [200 - 32 * n >= cfg.decoder_tail for n in range(2, 8)]
    assert [c.encoder_only for c in chunks].count(True) == 4


def test_skipped_decoder_changes_no_token():
    cfg, params = sessions.MICRO, init_params(sessions.MICRO, jax.random.key(4))
    prompts = [np.random.default_rng(0).integers(3, cfg.vocab_size, n).tolist() for n in (60, 2)]
    assert [c.encoder_only for c in generate.plan_chunks(prompts, cfg=cfg, prefill_chunk=16)].count(True) == 2
    tokens_BT = np.stack(list(generate.stream(params, prompts, cfg=cfg, max_new_tokens=8, prefill_chunk=16)), axis=1)
    whole = np.zeros((2, 60 + 8), np.int32)
    for row, prompt in enumerate(prompts):
        whole[row, : len(prompt) + 8] = [*prompt, *tokens_BT[row]]
    best_BT = np.asarray(inference.forward(params, whole, cfg=cfg)).argmax(-1)  # every layer, on every token
    for row, prompt in enumerate(prompts):
        np.testing.assert_array_equal(tokens_BT[row], best_BT[row, len(prompt) - 1 :][:8])


def test_greedy_takes_the_lowest_of_equals():
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    keys = generate.step_keys(jax.random.key(0), 2, 0)
    np.testing.assert_array_equal(generate.sample(logits, keys, generate.Sampling()), [1, 0])


def draws(sampling, logits, number=4000):
    keys = jax.vmap(lambda step: generate.step_keys(jax.random.key(3), 1, step)[0])(jnp.arange(number))
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (number, len(logits)))
    return np.bincount(
        jax.jit(generate.sample, static_argnames="sampling")(rows, keys, sampling), minlength=len(logits)
    )


def test_sampling_follows_the_distribution():
    probability = np.array([0.4, 0.3, 0.2, 0.1])
    logits = np.log(probability)
    chi_square_99_9 = 16.3  # 3 degrees of freedom
    counts = draws(generate.Sampling(temperature=1.0), logits)
    assert ((counts - 4000 * probability) ** 2 / (4000 * probability)).sum() < chi_square_99_9
    hot = np.sqrt(probability) / np.sqrt(probability).sum()
    counts = draws(generate.Sampling(temperature=2.0), logits)
    assert ((counts - 4000 * hot) ** 2 / (4000 * hot)).sum() < chi_square_99_9


def test_top_k_and_top_p_keep_the_fewest_best():
    logits = np.log([0.1, 0.4, 0.2, 0.3])
    assert set(np.nonzero(draws(generate.Sampling(temperature=1.0, top_k=2), logits))[0]) == {1, 3}
    assert set(np.nonzero(draws(generate.Sampling(temperature=1.0, top_p=0.7), logits))[0]) == {1, 3}
    assert set(np.nonzero(draws(generate.Sampling(temperature=1.0, top_p=0.71), logits))[0]) == {1, 2, 3}
    assert set(np.nonzero(draws(generate.Sampling(temperature=1.0, top_p=1e-9), logits))[0]) == {1}
    tied = [1.0, 1.0, 1.0, 1.0]
    assert set(np.nonzero(draws(generate.Sampling(temperature=1.0, top_k=2), tied))[0]) == {0, 1}


def test_a_rows_draws_do_not_depend_on_its_neighbours():
    alone = generate.step_keys(jax.random.key(9), 1, 4)
    together = generate.step_keys(jax.random.key(9), 5, 4)
    np.testing.assert_array_equal(jax.random.key_data(alone)[0], jax.random.key_data(together)[0])


def test_text_never_shows_half_a_character_or_a_stop():
    tokenizer = load_tokenizer(BUILT_IN)
    text = "naïve 😀 def stop() END of it"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    row = RowText(tokenizer, ("END", "XYZ"))
    pieces = [row.feed(token) for token in ids]
    assert "".join(pieces) + row.flush() == "naïve 😀 def stop() "
    assert not any("�" in piece for piece in pieces)
    assert row.feed(ids[0]) == ""


def test_text_gives_back_what_only_looked_like_a_stop():
    tokenizer = load_tokenizer(BUILT_IN)
    row = RowText(tokenizer, ("abcd",), end_token=1)
    shown = [row.feed(token) for token in tokenizer.encode("xabcxab", add_special_tokens=False).ids]
    assert "".join(shown) == "xabcx"
    assert row.feed(1) == "ab"
    assert row.ended


def test_ids_end_at_the_end_token():
    row = RowIds(end_token=1)
    assert [row.feed(token) for token in (5, 1, 7)] == ["5 ", "", ""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--token-ids", "5,600"], "prompt 0 holds token id 600; legal are 0 to 511"),
        (["--token-ids", "5,x"], "--token-ids '5,x' is not a list of whole numbers"),
        (["--token-ids", ""], "every prompt needs a token or more"),
        (["--max-new-tokens", "0"], "max_new_tokens=0; it must be 1 or more"),
        (
            ["--token-ids", "5", "--max-new-tokens", "256"],
            "need 257 positions; the model has max_position_embeddings=256",
        ),
        (["--prefill-chunk", "48"], "prefill_chunk=48; it must be a power of two from 16 on"),
        (["--temperature", "-1"], "temperature=-1.0; it must be 0"),
        (["--top-p", "0"], "top_p=0.0; it must be over 0 and at most 1"),
        (["--stop", ""], "a stop string is empty"),
        (["--token-ids", "5", "--stop", "x"], "--stop ends answers in text"),
        (["--top-k", "-2"], "top_k=-2; it must be 0"),
        (["--checkpoint", "/nowhere"], "/nowhere does not exist; give a checkpoint directory"),
        (["--prompt-file", "/nowhere"], "/nowhere"),
    ],
)
def test_script_refuses_in_one_sentence_before_loading(arguments, message, capsys):
    assert load_script("generate").main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_quantized_activations_change_the_logits_a_little():
    cfg = dataclasses.replace(sessions.MICRO, quantized=True, formats=config.Formats())
    params = init_params(cfg, jax.random.key(4))
    rounded = dataclasses.replace(cfg, formats=dataclasses.replace(cfg.formats, activation="fp8_e8m0_32"))
    ids = np.arange(3, 8)[None]
    exact, w8a8 = (np.asarray(inference.forward(params, ids, cfg=c)) for c in (cfg, rounded))
    assert 0 < sessions.spread(w8a8[:, 0], exact[:, 0]) < 2  # the first position, before flips pile up
