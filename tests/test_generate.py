"""scripts/generate.py and what is behind it: tokens, stops, sampling, buckets, messages."""

import dataclasses
import json

import golden_data
import jax
import numpy as np
import pytest
import sessions
from programs import load_script

from v41jax import config, inference, init_params, slots
from v41jax.assets import BUILT_IN
from v41jax.text import RowIds, RowText, load_tokenizer

GREEDY = json.loads((golden_data.GOLDEN / "tiny-fp8fp4" / "greedy.json").read_text())  # a float64 NumPy implementation


def test_script_answers_a_ragged_batch_as_the_reference(quick_compilation, capsys):
    ids = [f"--token-ids={','.join(map(str, case['prompt']))}" for case in GREEDY]
    assert load_script("generate").main([*ids, "--max-new-tokens=40", "--prefill-chunk=16"]) == 0
    out, err = capsys.readouterr()
    answers = [[int(t) for t in block.split("\n")[1].split()] for block in out.split("=== prompt")[1:]]
    end = config.tiny.eos_token_id
    assert answers == [[token for token in case["answer"] if token != end] for case in GREEDY]
    for word in ("load", "compile", "prefill", "decode", "cache"):
        assert f"\n{word} " in "\n" + err


def test_chunks_have_few_widths_and_skip_the_decoder_where_exact():
    cfg = config.tiny
    chunks = slots.plan_chunks([3] * 200, cfg=cfg, prefill_chunk=32)
    assert [c.tokens_1T.shape[1] for c in chunks] == [32] * 6 + [16]
    assert [c.length for c in chunks] == [32] * 6 + [8]
    # 36 tokens must follow a chunk that skips.
    assert [c.mode for c in chunks] == ["encoder" if 200 - 32 * n >= cfg.decoder_tail else "exact" for n in range(1, 8)]
    assert [c.mode for c in chunks].count("encoder") == 5
    layout = slots.Layout(capacity=201, prefill_chunk=32)
    assert {c.kind for c in chunks} == set(slots.chunk_kinds(layout, cfg))


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
        (["--token-ids", "5,600"], "prompt 0: the prompt holds token id 600; legal are 0 to 511"),
        (["--token-ids", "5,x"], "--token-ids '5,x' is not a list of whole numbers"),
        (["--token-ids", ""], "prompt 0: the prompt is empty; it needs a token or more"),
        (["--max-new-tokens", "0"], "max_new_tokens=0; it must be 1 or more"),
        (
            ["--token-ids", "5", "--max-new-tokens", "256"],
            "need 257 positions; a sequence may hold capacity=256",
        ),
        (["--prefill-chunk", "48"], "prefill_chunk=48; it must be a power of two from 16 on"),
        (["--temperature", "-1"], "temperature=-1.0; it must be 0"),
        (["--top-p", "0"], "top_p=0.0; it must be over 0 and at most 1"),
        (["--stop", ""], "a stop string is empty"),
        (["--token-ids", "5", "--stop", "x"], "--stop ends answers in text"),
        (["--top-k", "-2"], "top_k=-2; it must be 0"),
        (["--least-chance", "2"], "least_chance=2.0; it is a probability"),
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


def test_quantized_activations_change_the_logits_a_little(quick_compilation):
    cfg = dataclasses.replace(sessions.MICRO, quantized=True, formats=config.Formats())
    params = init_params(cfg, jax.random.key(4))
    rounded = dataclasses.replace(cfg, formats=dataclasses.replace(cfg.formats, activation="fp8_e8m0_32"))
    ids = np.arange(3, 8)[None]
    exact, w8a8 = (np.asarray(inference.forward(params, ids, cfg=c)) for c in (cfg, rounded))
    assert 0 < sessions.spread(w8a8[:, 0], exact[:, 0]) < 2  # the first position, before flips pile up
