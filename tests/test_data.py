"""Data: tokenizer, corpus, packing, order and resumption, passkeys."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from v41jax import config, engram
from v41jax.assets import BUILT_IN
from v41jax.training import corpus, data
from v41jax.training.passkey import DIGITS, PasskeyTask
from v41jax.training.tokenizer import SMALLEST, SPECIAL_TOKENS, train_tokenizer

CFG = config.tiny
BEGIN, END = CFG.bos_token_id, CFG.eos_token_id
TOKENIZER = Tokenizer.from_file(str(BUILT_IN / "tokenizer.json"))


def made_of(lengths):
    """A corpus whose every token is its own number."""
    start_K = np.cumsum([0, *lengths])
    return corpus.Corpus(tokens_N=np.arange(start_K[-1], dtype=np.int32), start_K=start_K)


# ---- tokenizer


def test_any_text_comes_back_and_digits_stay_single():
    tokenizer = train_tokenizer(corpus.standard_library(held_out=True)[:20], vocab_size=SMALLEST + 100)
    assert tokenizer.get_vocab_size() == SMALLEST + 100
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    text = "\tdef f():\n        return 12345 # \u00e9\u4e2d\U0001f600 \x00"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text
    assert len(tokenizer.encode("90210", add_special_tokens=False).ids) == 5


def test_a_vocabulary_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match=f"vocab_size=100; .* are {SMALLEST}"):
        train_tokenizer(["text"], vocab_size=100)
    with pytest.raises(ValueError, match="give more text"):
        train_tokenizer(["ab ab"], vocab_size=SMALLEST + 500)


def test_compressed_ids_agree_with_the_token_map():
    ids = engram.compressed_ids(TOKENIZER)
    np.testing.assert_array_equal(engram.token_map(BUILT_IN / "tokenizer.json", CFG)[: len(ids)], ids)


# ---- corpus


def test_the_standard_library_splits_into_disjoint_deterministic_halves():
    held, train = corpus.standard_library(held_out=True), corpus.standard_library(held_out=False)
    assert held == corpus.standard_library(held_out=True)
    assert not set(held) & set(train)
    assert 0 < len(held) < len(train) / 8
    assert any("class HTTPServer" in text for text in held + train)


@pytest.mark.parametrize(
    "content, message",
    [(b"", "is empty"), (b"abc\xff\xfe", "is not UTF-8: byte 0xff at 3"), (None, "cannot be read: No such file")],
)
def test_a_text_file_that_is_none_is_named(tmp_path, content, message):
    path = tmp_path / "text.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"text\.txt {message}"):
        corpus.load([path], TOKENIZER, cfg=CFG)


@pytest.mark.parametrize(
    "array, message",
    [
        (np.zeros((2, 2), np.int32), r"int32 \[2, 2\]; it must be"),
        (np.zeros(3, np.float32), r"float32 \[3\]; it must be"),
        (np.zeros(0, np.int32), r"int32 \[0\]; it must be"),
        (np.array([0, 512]), "holds token id 512; the model's are 0 to 511"),
        (np.array([0, -1]), "holds token id -1"),
        (np.array([None]), "is not a .npy array"),
    ],
)
def test_a_token_array_that_is_none_is_named(tmp_path, array, message):
    np.save(tmp_path / "tokens.npy", array, allow_pickle=True)
    with pytest.raises(ValueError, match=rf"tokens\.npy .*{message}"):
        corpus.load([tmp_path / "tokens.npy"], None, cfg=CFG)


def test_files_and_arrays_become_documents(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    np.save(tmp_path / "b.npy", np.array([BEGIN, 7, 8, BEGIN, 9], np.uint16))
    got = corpus.load([tmp_path / "b.npy", tmp_path / "a.txt"], TOKENIZER, cfg=CFG)
    text = TOKENIZER.encode("hello", add_special_tokens=False).ids
    want = [[BEGIN, *text, END], [BEGIN, 7, 8], [BEGIN, 9]]
    assert [document.tolist() for document in corpus.documents(got)] == want
    with pytest.raises(ValueError, match=r"text files need a tokenizer\.json"):
        corpus.load([tmp_path / "a.txt"], None, cfg=CFG)


def test_the_built_in_corpus_is_tokenized_once(tmp_path, monkeypatch):
    texts = corpus.standard_library(held_out=True)[:3]
    monkeypatch.setattr(corpus, "standard_library", lambda held_out: texts)
    first = corpus.built_in(TOKENIZER, held_out=True, cfg=CFG, cache=tmp_path)
    monkeypatch.setattr(corpus, "tokenize", None)  # a second call would fail
    again = corpus.built_in(TOKENIZER, held_out=True, cfg=CFG, cache=tmp_path)
    np.testing.assert_array_equal(first.tokens_N, again.tokens_N)
    assert len(first) == 3 and [path.suffix for path in tmp_path.iterdir()] == [".npy"]


# ---- packing


def test_every_token_is_in_one_row_and_long_documents_are_cut():
    lengths = [3, 20, 1, 8, 5, 8, 2, 17]
    rows = data.PackedRows(made_of(lengths), 8)
    seen, start_K = [], np.cumsum([0, *lengths])
    for number in range(len(rows)):
        tokens, document = rows[number]["tokens_BT"], rows[number]["document_BT"]
        assert tokens.dtype == document.dtype == np.int32 and tokens.shape == document.shape == (8,)
        real = document >= 0
        assert np.all(np.diff(document[real]) >= 0) and not np.any(np.diff(real.astype(int)) > 0)
        assert sorted(set(document[real])) == list(range(document.max() + 1))
        for k in set(document[real]):
            piece = tokens[document == k]
            assert np.all(np.diff(piece) == 1), "a piece is consecutive tokens"
            source = np.searchsorted(start_K, piece, side="right") - 1
            assert len(set(source)) == 1, "of one document"
            assert (piece[0] - start_K[source[0]]) % 8 == 0, "cut at multiples of the row length"
        seen += tokens[real].tolist()
    assert sorted(seen) == list(range(sum(lengths)))
    assert rows.filled == sum(lengths) / (8 * len(rows)) > 0.8


def test_first_fit_prefers_the_oldest_open_row():
    assert data.plan_rows(np.cumsum([0, 5, 6, 3, 2]), 8) == [[(0, 5), (11, 14)], [(5, 11), (14, 16)]]


def test_documents_begin_at_multiples():
    lengths = [3, 20, 1, 8, 5, 8, 2, 17]
    rows = data.PackedRows(made_of(lengths), 16, multiple=4)
    seen = []
    for number in range(len(rows)):
        tokens, document = rows[number]["tokens_BT"], rows[number]["document_BT"]
        assert all(np.flatnonzero(document == k)[0] % 4 == 0 for k in range(document.max() + 1))
        seen += tokens[document >= 0].tolist()
    assert sorted(seen) == list(range(sum(lengths)))
    with pytest.raises(ValueError, match=r"row_length=18 is not a multiple of 4, .* try 20"):
        data.PackedRows(made_of(lengths), 18, multiple=4)


def test_rows_older_than_the_open_ones_are_closed(monkeypatch):
    monkeypatch.setattr(data, "OPEN_ROWS", 1)
    assert data.plan_rows(np.cumsum([0, 5, 6, 3]), 8) == [[(0, 5)], [(5, 11)], [(11, 14)]]


# ---- order


def batches(seed=0, **kwargs):
    rows, other = data.PackedRows(made_of([8] * 40), 8), data.PackedRows(made_of([4] * 20), 8)
    return data.train_batches([(rows, 3.0), (other, 1.0)], batch_size=4, seed=seed, **kwargs)


def take(iterator, count):
    return np.stack([next(iterator)["tokens_BT"] for _ in range(count)])


def test_the_order_follows_from_the_seed():
    np.testing.assert_array_equal(take(batches(), 20), take(batches(), 20))
    assert not np.array_equal(take(batches(), 20), take(batches(seed=1), 20))


def test_a_saved_place_gives_the_batches_that_would_have_come():
    iterator = batches()
    take(iterator, 7)
    state = json.loads(json.dumps(iterator.get_state()))
    want = take(iterator, 9)
    other = batches()
    other.set_state(state)
    np.testing.assert_array_equal(take(other, 9), want)


def test_hosts_share_the_rows_of_one_order():
    alone = take(batches(), 6).reshape(-1, 8)
    shared = [take(batches(host=host, hosts=2), 6).reshape(-1, 8) for host in range(2)]
    np.testing.assert_array_equal(np.stack(shared, axis=1).reshape(-1, 8), alone)


def test_a_pass_has_every_row_once_and_shares_hold():
    iterator = data.train_batches([(data.PackedRows(made_of([8] * 40), 8), 1.0)], batch_size=4, seed=3)
    first, second = take(iterator, 10), take(iterator, 10)
    for one in (first, second):
        assert sorted(one[..., 0].ravel().tolist()) == list(range(0, 320, 8))
    assert not np.array_equal(first, second)
    mixed = batches()
    documents = np.concatenate([next(mixed)["document_BT"] for _ in range(100)])
    assert np.mean(documents.max(1) == 1) == 0.25


def test_data_that_gives_no_batch_is_refused():
    rows = data.PackedRows(made_of([8]), 8)
    with pytest.raises(ValueError, match="batch_size=3 is not a positive multiple of the 2 hosts"):
        data.train_batches([(rows, 1.0)], batch_size=3, seed=0, hosts=2)
    with pytest.raises(ValueError, match="no row"):
        data.train_batches([(rows, 0.0)], batch_size=1, seed=0)
    with pytest.raises(ValueError, match="row_length=1"):
        data.PackedRows(made_of([8]), 1)


def test_validation_has_every_row_once_and_fills_up_with_padding():
    got = list(data.valid_batches(data.PackedRows(made_of([8] * 5), 8), batch_size=2))
    assert [batch["document_BT"].max(1).tolist() for batch in got] == [[0, 0], [0, 0], [0, -1]]
    assert len(list(data.valid_batches(data.PackedRows(made_of([8] * 5), 8), batch_size=2, limit=1))) == 1


# ---- passkeys


def task(row_length=256, **kwargs):
    filler = corpus.tokenize(corpus.standard_library(held_out=True)[:2], TOKENIZER, cfg=CFG)
    return PasskeyTask(filler, TOKENIZER, cfg=CFG, row_length=row_length, rows=100, seed=5, **kwargs)


@pytest.mark.parametrize("length, keys, depth", [(100, 1, None), (100, 1, 0.0), (100, 1, 1.0), (1000, 9, None)])
def test_answers_stand_where_they_are_said_to(length, keys, depth):
    document = task().document(4, length=length, keys=keys, depth=depth)
    assert document.tokens_T.shape == document.answer_T.shape == (length,)
    assert document.tokens_T[0] == BEGIN
    text = TOKENIZER.decode(document.tokens_T.tolist())
    said = text.split("# pass key ")[1:]
    told, asked = said[:keys], said[keys:]
    keys_told = {part[0]: part[2 : 2 + DIGITS] for part in told}
    assert len(keys_told) == len(asked) == keys
    answers = [keys_told[part[0]] for part in asked]
    assert [part[2 : 2 + DIGITS] for part in asked] == answers
    assert TOKENIZER.decode(document.tokens_T[document.answer_T].tolist()) == "".join(answers)
    assert document.answer_T[-1]


def test_documents_follow_from_seed_and_index():
    a, b, c = task().document(4, length=100), task().document(4, length=100), task().document(5, length=100)
    np.testing.assert_array_equal(a.tokens_T, b.tokens_T)
    assert not np.array_equal(a.tokens_T, c.tokens_T)


def test_training_rows_are_whole_documents():
    rows = task()
    counts = set()
    for index in range(30):
        row = rows[index]
        assert row["tokens_BT"].shape == (256,) and row["document_BT"].min() >= 0
        counts.add(int(row["document_BT"].max()) + 1)
        np.testing.assert_array_equal(row["tokens_BT"], rows[index]["tokens_BT"])
    assert len(counts) > 1


def test_a_passkey_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"length=20 is .* tokens too short for keys=1"):
        task().document(0, length=20)
    with pytest.raises(ValueError, match="keys=27"):
        task().document(0, length=5000, keys=27)
    with pytest.raises(ValueError, match="row_length=16"):
        task(row_length=16)
