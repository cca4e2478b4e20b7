"""The engine: whoever is served beside a request, its tokens are the same; nothing is left behind, nothing compiled."""

import dataclasses
import functools
import io

import jax
import numpy as np
import pytest
import served
from programs import load_script

from v41jax import chat, inference, memory, model, tree, v41_flash
from v41jax.chat import AnswerText, Message
from v41jax.engine import Engine
from v41jax.prefixes import Prefixes
from v41jax.sampling import Sampling
from v41jax.slots import Layout
from v41jax.text import RowText
from v41jax.tickets import Busy, Request

CFG = served.CFG
LAYOUT = Layout(slots=3, capacity=80, prefill_chunk=16, drafts=True, prefix_bytes=1 << 20)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def engine(quick_compilation):
    out = Engine(served.params(), CFG, LAYOUT, most_waiting=20)
    out.warm()
    return out


@pytest.fixture(scope="module")
def cold(engine):
    """An engine that keeps no prefixes, of the same programs."""
    out = Engine(served.params(), CFG, dataclasses.replace(LAYOUT, prefix_bytes=0))
    out.programs = engine.programs
    return out


@pytest.fixture(autouse=True)
def nothing_is_traced(engine, monkeypatch):
    """What is warm serves all requests: the backbone is never traced again."""

    def trace(*args, **static):
        raise AssertionError("traced after warm-up")

    monkeypatch.setattr(model, "run", trace)


def mixed_requests():
    """Prompts of every number of chunks, greedy and drawn, some alike."""
    rng, out = np.random.default_rng(0), []
    for number, length in enumerate((1, 47, 16, 5, 33, 60, 17, 2, 32, 60)):
        settings = Sampling(temperature=1.0, top_k=50) if number % 3 == 2 else Sampling(alternatives=number % 4)
        prompt = rng.integers(3, 500, length).tolist()
        out.append(Request(prompt=prompt, max_new_tokens=1 + 2 * number, settings=settings, seed=number))
    return out


@pytest.fixture(scope="module")
def alone(cold):
    """The answers of all mixed requests, one by one."""
    return [cold.run([request])[0] for request in mixed_requests()]


def test_greedy_tokens_are_the_models(alone):
    requests = [(r, a) for r, a in zip(mixed_requests(), alone, strict=True) if r.settings.temperature == 0]
    whole = np.zeros((len(requests), LAYOUT.capacity), np.int32)
    for row, (request, answer) in enumerate(requests):
        ids = [*request.prompt, *(token.id for token in answer)]
        whole[row, : len(ids)] = ids
    logits = np.asarray(inference.forward(served.params(), whole, cfg=CFG))
    logprob = logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))
    for row, (request, answer) in enumerate(requests):
        said = logprob[row, len(request.prompt) - 1 :][: len(answer)]
        assert [token.id for token in answer] == said.argmax(-1).tolist()
        np.testing.assert_allclose([token.logprob for token in answer], said.max(-1), rtol=0, atol=1e-4)
        for token, row_V in zip(answer, said, strict=True):
            best = np.argsort(-row_V, kind="stable")[: request.settings.alternatives]
            assert [id for id, _ in token.best] == best.tolist()
            np.testing.assert_allclose([p for _, p in token.best], row_V[best], rtol=0, atol=1e-4)


def test_a_batch_changes_no_bit(engine, alone):
    assert engine.run(mixed_requests()) == alone
    assert engine.run(mixed_requests()[::-1]) == alone[::-1]
    assert [len(answer) for answer in alone] == [request.max_new_tokens for request in mixed_requests()]


def test_coming_leaving_and_cancelling_leaves_nothing_behind(engine, alone):
    rng, requests = np.random.default_rng(1), mixed_requests()
    asked, got, done = {}, {}, 0
    for _ in range(250):
        if rng.random() < 0.4 and engine.waiting < 6:
            number = int(rng.integers(len(requests)))
            asked[engine.submit(requests[number])] = number
        live = [ticket for ticket in asked if ticket.finish is None]
        if live and rng.random() < 0.15:
            engine.cancel(live[rng.integers(len(live))])
        for update in engine.turn():
            assert update.ticket not in got or got[update.ticket][1] is None  # nothing comes behind an end
            tokens = got.get(update.ticket, ([], None))[0] + update.tokens
            got[update.ticket] = tokens, update.finish
        assert engine.running <= LAYOUT.slots
    while not engine.idle:
        for update in engine.turn():
            got[update.ticket] = got.get(update.ticket, ([], None))[0] + update.tokens, update.finish
    assert got.keys() == asked.keys()
    for ticket, (tokens, finish) in got.items():
        want = alone[asked[ticket]]
        assert tokens == (want[: len(tokens)] if finish == "cancelled" else want)
        done += finish == "length"
    assert done > 20
    assert len(got) - done > 5
    assert engine._tickets == [None] * LAYOUT.slots
    assert engine._staging is None
    assert int(engine._staged.cache.length_B[0]) == 0


def state_of(engine, prompt):
    """Every array of a slot's state once a prompt is in it, by name, but for how much of it was known."""
    engine.run([Request(prompt=prompt, max_new_tokens=1)])
    state = engine._state.cache, engine._state.rings, engine._state.token_B
    rows = {jax.tree_util.keystr(path): leaf[0] for path, leaf in jax.tree.leaves_with_path(state)}
    return {name: np.asarray(row) for name, row in rows.items() if "kept" not in name}


def differing(got, want):
    return [name for name in want if not np.array_equal(got[name], want[name])]


def test_a_known_prefix_changes_no_bit_of_the_state(engine, cold, monkeypatch):
    rng = np.random.default_rng(8)
    first = rng.integers(3, 500, 66).tolist()
    # The fourth chunk of 66 and of 67 tokens enters the decoder, that of 70 does not: another program made its entries.
    for shared, length, reused in ((66, 66, 48), (50, 60, 32), (64, 70, 32), (33, 75, 16), (16, 40, 0), (66, 67, 48)):
        prompt = [*first[:shared], *rng.integers(3, 500, length - shared).tolist()]
        want, before = state_of(cold, prompt), engine.counts.reused_tokens
        engine.prefixes = Prefixes(1 << 20)
        engine.run([Request(prompt=first, max_new_tokens=1)])
        assert differing(state_of(engine, prompt), want) == []
        assert engine.counts.reused_tokens - before == reused
    # And a replay that starts a chunk later would not do.
    monkeypatch.setattr("v41jax.engine.replay_start", lambda *args: 64)
    assert differing(state_of(engine, first), state_of(cold, first))


def test_prefixes_go_to_disk_and_back(engine, cold, tmp_path, caplog):
    prompt = np.random.default_rng(9).integers(3, 500, 66).tolist()
    engine.prefixes = Prefixes(1 << 20)
    state_of(engine, prompt)
    engine.save_prefixes(tmp_path)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 4

    engine.prefixes = Prefixes(1 << 20)
    assert engine.load_prefixes(tmp_path) == 4
    before = engine.counts.reused_tokens
    assert differing(state_of(engine, prompt), state_of(cold, prompt)) == []
    assert engine.counts.reused_tokens - before == 48

    data = bytearray(files[0].read_bytes())
    data[-5] ^= 1
    files[0].write_bytes(data)
    files[1].write_bytes(files[1].read_bytes()[:-1])
    files[2].rename(files[0].with_stem("0" * 64))
    engine.prefixes = Prefixes(1 << 20)
    assert engine.load_prefixes(tmp_path) == 1
    assert caplog.text.count("is not used: it is damaged") == 3
    assert engine.prefixes.load(tmp_path, "another", 0) == 0
    assert "it is of another model, or of other weights, programs or devices" in caplog.text


def test_a_stop_string_ends_an_answer_and_frees_the_slot(engine):
    tokenizer = served.tokenizer()
    prompt = tokenizer.encode("def f(x):", add_special_tokens=False).ids
    request = Request(prompt=prompt, max_new_tokens=30, reader=functools.partial(RowText, tokenizer))
    (whole,) = engine.run([request])
    text = tokenizer.decode([token.id for token in whole])
    stop = text[8:11]
    ticket = engine.submit(dataclasses.replace(request, reader=functools.partial(RowText, tokenizer, (stop,))))
    said, finish = "", []
    while not engine.idle:
        for update in engine.turn():
            said += "".join(token.text for token in update.tokens) + (update.rest or "")
            finish += [update.finish] * (update.finish is not None)
    assert said == text[: text.index(stop)]
    assert finish == ["stop"] == [ticket.finish]
    assert ticket.made < 30


def test_a_seed_decides_what_is_drawn(engine):
    def draw(seed):
        request = Request(prompt=[5, 6], max_new_tokens=12, settings=Sampling(temperature=1.0), seed=seed)
        return [token.id for token in engine.run([request, mixed_requests()[1]])[0]]

    assert draw(7) == draw(7) != draw(8)


def test_the_queue_is_bounded(engine):
    request = Request(prompt=[5], max_new_tokens=2)
    tickets = [engine.submit(request) for _ in range(20)]
    with pytest.raises(Busy, match="20 requests are waiting, as many as may"):
        engine.submit(request)
    for ticket in tickets:
        engine.cancel(ticket)
    assert [update.finish for update in engine.turn()] == ["cancelled"] * 20
    assert engine.idle


def test_a_conversation_in_the_terminal(engine, monkeypatch, capsys):
    script, submit, asked = load_script("chat"), engine.submit, []
    for name, made in (
        ("load_config", CFG),
        ("load_tokenizer", served.tokenizer()),
        ("load_checkpoint", (CFG, None)),
        ("Engine", engine),
    ):
        monkeypatch.setattr(script, name, lambda *args, made=made, **named: made)
    monkeypatch.setattr(engine, "submit", lambda request: asked.append(request.prompt) or submit(request))
    monkeypatch.setattr("sys.stdin", io.StringIO("x\ny\n\nnever read\n"))
    assert script.main(["--checkpoint=any", "--max-new-tokens=6", "--capacity=80", "--temperature=0"]) == 0
    shown = capsys.readouterr().out.split("\n")
    first = chat.prompt_ids([Message("user", "x")], served.tokenizer())
    answer = AnswerText(served.tokenizer())
    said = [answer.feed(token.id)[1] for token in engine.run([Request(prompt=first, max_new_tokens=6)])[0]]
    said = "".join(said) + answer.flush()[1]
    assert asked[0] == first
    assert asked[1] == chat.prompt_ids(
        [Message("user", "x"), Message("assistant", said), Message("user", "y")], served.tokenizer()
    )
    assert "\n".join(shown).startswith(said)
    assert len(asked) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5, 519]}, "holds token id 519; legal are 0 to 518"),
        ({"max_new_tokens": 0}, "max_new_tokens=0; it must be 1 or more"),
        ({"seed": -1}, "seed=-1; legal are 0 to 4294967295"),
        ({"prompt": [5] * 79, "max_new_tokens": 2}, "need 81 positions; a sequence may hold capacity=80"),
    ],
)
def test_what_cannot_be_served_is_refused(engine, change, message):
    request = dataclasses.replace(Request(prompt=[5], max_new_tokens=1), **change)
    with pytest.raises(ValueError, match=message):
        engine.submit(request)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 0}, "slots=0; an engine has 1 or more"),
        ({"prefill_chunk": 48}, "prefill_chunk=48; it must be a power of two from 16 on"),
        ({"capacity": 257}, "capacity=257 tokens; legal are 2 to max_position_embeddings=256"),
        ({"least_chance": 2}, "least_chance=2; it is a probability"),
    ],
)
def test_an_engine_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        Engine(served.params(), CFG, dataclasses.replace(LAYOUT, **change))


def test_a_context_that_does_not_fit_is_refused_with_one_that_does():
    layout = dataclasses.replace(LAYOUT, capacity=256)
    weights = tree.nbytes(served.params())
    room = memory.cache_bytes(CFG, dataclasses.replace(layout, capacity=100))
    with pytest.raises(ValueError, match=r"capacity=256 tokens in 3 slots .*: the largest capacity that fits is 100;"):
        Engine(served.params(), CFG, layout, memory_bytes=weights + room)
    memory.check(CFG, dataclasses.replace(layout, capacity=100), memory=weights + room, weights=weights)
    with pytest.raises(ValueError, match="no capacity fits; take fewer slots"):
        Engine(served.params(), CFG, layout, memory_bytes=weights)
    with pytest.raises(ValueError, match=r"1000 for working; .* the largest capacity that fits is 98;"):
        memory.check(CFG, layout, memory=weights + room, weights=weights, scratch=1000)
    released = Layout(slots=1, capacity=1 << 20)
    assert memory.cache_bytes(v41_flash, released) == pytest.approx(2 * 890 * 2**20, rel=0.01)
