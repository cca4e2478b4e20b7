"""What a checkpoint is worth: accepted drafts against the training loss's count, and the script's figures."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SCRIPTS, load_script
from test_draft_stage import CFG, master

from v41jax import config_json, forward, init_params, save_checkpoint
from v41jax.training import corpus, evaluation, packing, qat
from v41jax.training import drafts as training
from v41jax.training import forward as training_forward

ROUNDING = 1e-6  # relative: a mean of counts in float64


def test_tokens_of_the_calls_of_speculative_decoding():
    assert evaluation.accepted_tokens(np.array([2, 9, 9, 0, 1, 9, 3])) == [3, 1, 2, 4]
    assert evaluation.accepted_tokens(np.array([0, 0])) == [1, 1]


def test_accepted_drafts_are_those_the_training_loss_counts_on_the_answers():
    length, new, rows, n = 11, 20, 3, CFG.dspark_block_size
    params = dict(master(CFG))
    few = np.random.default_rng(3).normal(scale=0.3, size=(3, CFG.hidden_size))  # tokens, so that drafts hit at times
    params["head"] = jnp.zeros_like(params["head"]).at[:3].set(few.astype(np.float32))
    w = jax.jit(lambda p: qat.compute_weights(p, cfg=CFG, dtype=jnp.float32, weights=False))(params)
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, CFG.vocab_size, size).astype(np.int32) for size in (length, 5, length + 4, 40)]
    text = corpus.Corpus(tokens_N=np.concatenate(documents), start_K=np.cumsum([0, *map(len, documents)]))
    options = {"cfg": CFG, "length": length, "prompts": rows, "batch_size": 2}
    got = evaluation.draft_acceptance(w, text, new_tokens=new, **options)

    total = length + new
    tokens_BT = np.zeros((rows, total), np.int32)
    tokens_BT[:, :length] = [d[:length] for d in documents if len(d) >= length]
    for column in range(length, total):  # greedy, from nothing each time
        logits = forward(w, tokens_BT, cfg=CFG, lengths_B=np.full(rows, column))
        tokens_BT[:, column] = np.argmax(logits[:, column - 1], axis=-1)
    best_BT = np.full((rows, total), -1, np.int32)  # what is right behind each column of an answer, and nowhere else
    best_BT[:, length:-1] = tokens_BT[:, length + 1 :]

    @jax.jit
    def count(best_BT, batch):
        passed = training_forward.run(
            w, batch["tokens_BT"], packing.Documents(batch["document_BT"]), cfg=CFG, hidden=True
        )
        return training.draft_loss(w, passed.hidden_BTM, best_BT, batch, cfg=CFG).accepted_n

    for place in range(n):  # so short that only blocks of which n tokens are known reach this place
        stop = total - (n - 1 - place)
        document_BT = np.where(np.arange(total) < stop, 0, -1) * np.ones((rows, 1), np.int32)
        batch = packing.align({"tokens_BT": tokens_BT, "document_BT": document_BT.astype(np.int32)}, cfg=CFG)
        wide = np.pad(best_BT, ((0, 0), (0, batch["tokens_BT"].shape[1] - total)), constant_values=-1)
        want = float(count(wide, batch)[place]) / (rows * (new - n))
        np.testing.assert_allclose(got.share_n[place], want, rtol=ROUNDING)
    assert 0 < got.share_n[-1] < got.share_n[0] < 1
    assert 1 < got.tokens_a_call < n + 1

    with pytest.raises(ValueError, match="no held-out document has 41 tokens"):
        evaluation.draft_acceptance(w, text, new_tokens=new, **{**options, "length": 41})
    with pytest.raises(ValueError, match=f"new_tokens={n}; a block is {n} tokens, so an answer needs {n + 1} or more"):
        evaluation.draft_acceptance(w, text, new_tokens=n, **options)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two random micro checkpoints of one config, with drafts and a candidate pool, and a text."""
    directory = tmp_path_factory.mktemp("two")
    cfg = dataclasses.replace(
        config_json.load_config(SCRIPTS / "micro"),
        num_hidden_layers=2,
        compress_ratios=(1, 1, 0),
        kv_source_layer_ids=(0,),
        index_source_layer_ids=(0, 1),
        candidate_source_layer_id=0,
        engram_layer_ids=(),
        engram_num_embeddings=(),
        num_nextn_predict_layers=1,
        dspark_target_layer_ids=(1,),
    )
    paths = [directory / name for name in ("before", "after")]
    for number, path in enumerate(paths):
        params = init_params(cfg, jax.random.key(number), dtype=jnp.bfloat16)
        save_checkpoint(path, params, cfg=cfg, tokenizer=SCRIPTS / "micro" / "tokenizer.json")
    text = directory / "text.txt"
    text.write_text("def f(x):\n    return x + 1\n" * 200)
    return paths, text


def arguments(two, *more):
    paths, text = two
    sizes = {"loss-length": 64, "pieces": 4, "recall-length": 64, "batch-size": 2, "passkeys": 2, "prompts": 2}
    sizes |= {"prompt-length": 16, "new-tokens": 8}
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return ["--checkpoint", *map(str, paths), "--text", str(text), "--lengths", "64", "128", *flags, *more]


def test_all_figures_are_reported(two, tmp_path, capsys):
    evaluate = load_script("evaluate")
    assert evaluate.main(arguments(two, "--output", str(tmp_path / "out"))) == 0
    results = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["evaluation.json", "evaluation.png"]
    assert list(results) == [str(path) for path in two[0]]
    for result in results.values():
        assert result["loss"].keys() == {"quantised", "plain"}
        assert result["loss"]["quantised"] != result["loss"]["plain"]
        assert len(result["recall"]) == 2 and all(0 < share <= 1 for share in result["recall"])
        assert {pool: list(shares) for pool, shares in result["passkey"].items()} == {
            "on": ["64", "128"],
            "off": ["64", "128"],
        }
        share_n = result["drafts"]["share_n"]
        assert len(share_n) == 3 and np.all(np.diff(share_n) <= 0)
        assert 1 <= result["drafts"]["tokens_a_call"] <= 4
    assert results[str(two[0][0])]["loss"] != results[str(two[0][1])]["loss"]
    shown = capsys.readouterr().out
    for line in (
        r"plain caches: \d",
        r"recall of index source 1: \d",
        "at +128 tokens, pool off: ",
        "tokens a call, with drafts: ",
    ):
        assert len(re.findall(line, shown)) == 2, line


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lengths", "512"], "length 512 exceeds max_position_embeddings=256"),
        (["--new-tokens", "3"], "--new-tokens 3; it must be 4 or more"),
        (["--pieces", "0"], "--pieces 0; it must be 1 or more"),
    ],
)
def test_what_cannot_be_measured_is_refused(two, capsys, more, message):
    assert load_script("evaluate").main(arguments(two, *more)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path, capsys):
    assert load_script("evaluate").main(["--checkpoint", str(tmp_path / "absent")]) == 2
    assert "absent" in capsys.readouterr().err
