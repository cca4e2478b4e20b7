"""The engine: whoever is served beside a request, its tokens are the same; nothing is left behind, nothing compiled."""

import dataclasses
import functools
import io

import numpy as np
import pytest
import served
from programs import load_script

from v41jax import chat, inference, model
from v41jax.chat import AnswerText, Message
from v41jax.engine import Busy, Engine, Request
from v41jax.sampling import Sampling
from v41jax.slots import Layout
from v41jax.text import RowText

CFG = served.CFG
LAYOUT = Layout(slots=3, capacity=80, prefill_chunk=16, drafts=True)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def engine(quick_compilation):
    out = Engine(served.params(), CFG, LAYOUT, most_waiting=20)
    out.programs.warm()
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
def alone(engine):
    """The answers of all mixed requests, one by one."""
    return [engine.run([request])[0] for request in mixed_requests()]


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
