"""The endpoint, through the official client on the loopback: answers, streams, refusals, disconnects, stopping."""

import asyncio
import contextlib
import http.client
import json
import random
import time

import numpy as np
import openai
import pytest
import served
from programs import load_script

from v41jax import chat
from v41jax.chat import AnswerText, Message, Style
from v41jax.engine import Engine
from v41jax.sampling import Sampling
from v41jax.serving.app import Limits, make_app
from v41jax.serving.protocol import Model
from v41jax.serving.worker import Worker
from v41jax.slots import Layout
from v41jax.text import RowText
from v41jax.tickets import Request

CFG = served.CFG
LAYOUT = Layout(slots=4, capacity=120, prefill_chunk=16)
PATIENCE = 60  # seconds for what must happen soon, on a machine that may be busy
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def engine(quick_compilation):
    out = Engine(served.params(), CFG, LAYOUT, most_waiting=200)
    out.warm()
    return out


@pytest.fixture(scope="module")
def model():
    return Model(name="tiny", cfg=CFG, layout=LAYOUT, tokenizer=served.tokenizer())


def prompts():
    """Token ids of a dozen completions."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, 500, 1 + 7 * number).tolist() for number in range(12)]


def asked(number):
    """A conversation, and how it is to be answered."""
    style = Style(thinking=True, effort="low") if number % 2 else Style()
    return [Message("system", "Be brief."), Message("user", "naïve 😀 " * number + "?")], style


@pytest.fixture(scope="module")
def alone(engine):
    """Greedy answers of the engine itself, one by one, before it is served: of `prompts`, and of four conversations."""
    ids = prompts() + [chat.prompt_ids(messages, served.tokenizer(), style) for messages, style in map(asked, range(4))]
    settings = Sampling(alternatives=2)
    return [engine.run([Request(prompt=p, max_new_tokens=12, settings=settings)])[0] for p in ids]


def text_of(tokens):
    read = RowText(served.tokenizer(), (), CFG.eos_token_id)
    return "".join([read.feed(token.id) for token in tokens]) + read.flush()


@pytest.fixture(scope="module")
def server(engine, model, alone):
    with served.serving(make_app(Worker(engine), model, Limits())) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def call(server, path, body, method="POST"):
    """One raw HTTP call: status, headers, the JSON of the answer."""
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    with contextlib.closing(connection):
        connection.request(method, path, body if isinstance(body, bytes) else json.dumps(body).encode())
        response = connection.getresponse()
        text = response.read()
        return response.status, response.headers, json.loads(text) if text.startswith(b"{") else text.decode()


def wait_until(condition):
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def complete(client, number, **more):
    return client.completions.create(model="tiny", prompt=prompts()[number], max_tokens=12, temperature=0, **more)


def test_completions_are_the_engines(client, alone):
    for number in (0, 5):
        answer = complete(client, number, logprobs=2)
        choice, want = answer.choices[0], alone[number]
        assert choice.text == text_of(want)
        assert choice.finish_reason == "length"
        assert choice.logprobs.token_logprobs == [token.logprob for token in want]
        assert [list(best.values()) for best in choice.logprobs.top_logprobs] == [
            [p for _, p in token.best] for token in want
        ]
        size = len(prompts()[number])
        assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
            "prompt_tokens": size, "completion_tokens": 12, "total_tokens": size + 12,
        }  # fmt: skip


def test_streams_are_the_whole_answer(client, alone):
    *pieces, last = complete(client, 3, stream=True, stream_options={"include_usage": True})
    assert "".join(piece.choices[0].text for piece in pieces) == text_of(alone[3])
    assert [piece.choices[0].finish_reason for piece in pieces if piece.choices[0].finish_reason] == ["length"]
    assert last.choices == []
    assert last.usage.completion_tokens == 12


@pytest.mark.parametrize("number", range(4))
def test_conversations(client, alone, number):
    messages, style = asked(number)
    said = [{"role": message.role, "content": message.content} for message in messages]
    settings = {"reasoning_effort": style.effort if style.thinking else "none", "max_tokens": 12, "temperature": 0}
    read = AnswerText(served.tokenizer(), style)
    pieces = [read.feed(token.id) for token in alone[12 + number]] + [read.flush()]
    thought, content = ("".join(part) for part in zip(*pieces, strict=True))

    answer = client.chat.completions.create(
        model="tiny", messages=said, logprobs=True, top_logprobs=1, **settings
    )  # fmt: skip
    message = answer.choices[0].message
    assert (getattr(message, "reasoning_content", ""), message.content) == (thought, content)
    logprobs = answer.choices[0].logprobs.content
    assert [entry.logprob for entry in logprobs] == [token.logprob for token in alone[12 + number]]
    assert [entry.top_logprobs[0].logprob for entry in logprobs] == [entry.logprob for entry in logprobs]  # greedy

    got = ["", ""]
    for piece in client.chat.completions.create(model="tiny", messages=said, stream=True, **settings):
        delta = piece.choices[0].delta
        new = getattr(delta, "reasoning_content", None) or "", delta.content or ""
        assert "\ufffd" not in "".join(new) or "\ufffd" in thought + content
        got = [a + b for a, b in zip(got, new, strict=True)]
    assert got == [thought, content]


def test_several_prompts_several_choices_and_seeds(client):
    answer = client.completions.create(
        model="tiny", prompt=[[5, 6], [7]], n=2, max_tokens=8, seed=3, logprobs=0, extra_body={"top_k": 40}
    )  # fmt: skip
    texts = [choice.text for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len(set(texts)) == 4
    again = client.completions.create(
        model="tiny", prompt=[7], max_tokens=8, seed=4, logprobs=0, extra_body={"top_k": 40}
    )  # fmt: skip
    assert again.choices[0].text == texts[3]


def test_a_stop_string_is_not_shown(client, alone):
    whole = text_of(alone[4])
    stop = whole[len(whole) // 2 :][:2]
    answer = complete(client, 4, stop=[stop])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text == whole[: whole.index(stop)]


def test_many_streams_at_once_do_not_mix(server, alone):
    async def one(client, number):
        pieces = [piece async for piece in await complete(client, number % 12, stream=True)]
        return "".join(piece.choices[0].text for piece in pieces) == text_of(alone[number % 12])

    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, number) for number in range(36)))

    assert asyncio.run(everyone()) == [True] * 36


@pytest.mark.parametrize("stream", [True, False])
def test_a_caller_who_leaves_frees_the_slot(server, engine, stream):
    before = engine.counts.finished["cancelled"]
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
    body = {"prompt": [5, 6], "max_tokens": 110, "stream": stream, "n": 20}
    connection.request("POST", "/v1/completions", json.dumps(body).encode())
    wait_until(lambda: engine.running)
    connection.close()
    wait_until(lambda: engine.idle)
    assert engine.counts.finished["cancelled"] > before


def test_health_models_and_metrics(server, client):
    assert call(server, "/health", b"", "GET")[::2] == (200, {"status": "ok"})
    assert [model.id for model in client.models.list()] == ["tiny"]
    status, headers, text = call(server, "/metrics", b"", "GET")
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert figures["v41jax_slots"] == "4"
    assert int(figures["v41jax_made_tokens_total"]) > 0
    assert int(figures['v41jax_requests_finished_total{reason="length"}']) > 0


OK = {"prompt": "x", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "the body is not JSON"),
        (b"\xff{}", 400, "the body is not JSON"),
        (b"[" * 100000, 400, "the body is not JSON"),
        (b'{"prompt": "x", "temperature": NaN}', 400, "the body holds NaN, which is no JSON number"),
        (b"[]", 400, "the body is a JSON array; it must be an object"),
        (b" " * (2 << 20), 413, "the body is over 1048576 bytes"),
        ({}, 400, "prompt must be a string, an array of token ids, or an array of either"),
        ({"prompt": ""}, None, ""),
        ({"prompt": []}, 400, "prompt must be"),
        ({"prompt": [[]]}, 400, "the prompt is empty"),
        ({"prompt": [519]}, 400, "the prompt holds token id 519; legal are 0 to 518"),
        ({"prompt": "\ud800"}, 400, "prompt holds half of a surrogate pair"),
        ({"prompt": "ab" * 400}, 400, "a sequence may hold capacity=120"),
        (OK | {"model": "other"}, 404, "there is no model 'other'; this server has 'tiny'"),
        (OK | {"max_tokens": 0}, 400, "max_tokens is 0; it must be a whole number from 1 to 120"),
        (OK | {"max_tokens": True}, 400, "max_tokens is true; it must be a whole number"),
        (OK | {"temperature": -1}, 400, "temperature is -1; it must be a number from 0 to 2"),
        (OK | {"top_p": 0}, 400, "top_p is 0; it must be a number"),
        (OK | {"n": 65}, 400, "n is 65; it must be a whole number from 1 to 64"),
        (OK | {"prompt": ["x"] * 5, "n": 20}, 400, "n times 5 prompts makes 100; at most 64"),
        (OK | {"stop": [""]}, 400, "stop must be up to 16 strings of 1 to 256 characters"),
        (OK | {"stop": 5}, 400, "stop is a JSON number; it must be a string"),
        (OK | {"logprobs": 21}, 400, "logprobs is 21; it must be a whole number from 0 to 20"),
        (OK | {"stream": 1}, 400, "stream is a JSON number; it must be true or false"),
        (OK | {"stream_options": {"x": 1}}, 400, "stream_options.x is not a field of this endpoint"),
        (OK | {"echo": True}, 400, "echo is true; this server supports false only"),
        (OK | {"frequency_penalty": 1}, 400, "frequency_penalty is 1; this server supports 0 only"),
        (OK | {"nonsense": 1}, 400, "nonsense is not a field of this endpoint"),
        ({"messages": []}, 400, "messages must be an array of one or more messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role does not fit: role='robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content is a JSON number"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, 400, "it must end with a message of role 'user'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "this server reads text only"),
        ({"messages": [{"role": "user", "content": "ab" * 400}]}, 400, "at most 119 fit"),
        (CHAT | {"tools": [{}]}, 400, "tools is [{}]; this server supports [] only"),
        (CHAT | {"reasoning_effort": []}, 400, "reasoning_effort is a JSON array; it must be a string"),
        (CHAT | {"reasoning_effort": "huge"}, 400, "reasoning_effort must be none, low, high, xhigh, max"),
        (CHAT | {"top_logprobs": 2}, 400, "top_logprobs needs logprobs to be true"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(server, body, status, message):
    path = "/v1/chat/completions" if isinstance(body, dict) and "messages" in body else "/v1/completions"
    if status is None:  # not an error: the start token alone is a prompt
        assert call(server, path, body)[0] == 200
        return
    got, _, answer = call(server, path, body)
    assert got == status
    assert message in answer["error"]["message"]
    assert "\n" not in answer["error"]["message"]


def test_paths_and_methods_that_are_not_there(server):
    assert call(server, "/v1/nothing", b"")[0] == 404
    assert call(server, "/v1/completions", b"", "GET")[0] == 405


def test_no_input_is_an_error_of_ours(server, engine):
    rng = random.Random(5)
    values = [
        None,
        True,
        -1,
        0,
        2,
        1e308,
        "",
        "x",
        "\ud83d",
        [],
        {},
        [1],
        ["x"],
        [[5]],
        {"role": "user"},
        "\x00",
        [None],
    ]
    names = [
        *OK,
        *CHAT,
        "n",
        "stop",
        "logprobs",
        "top_logprobs",
        "temperature",
        "top_p",
        "stream",
        "seed",
        "model",
        "echo",
    ]
    for _ in range(150):
        body = dict(rng.choice([OK, CHAT]))
        for _ in range(rng.randint(1, 3)):
            body[rng.choice(names)] = rng.choice(values)
        raw = json.dumps(body).encode()
        if rng.random() < 0.2:
            at = rng.randrange(len(raw))
            raw = raw[:at] + bytes([rng.randrange(256)]) + raw[at + rng.randint(0, 3) :]
        status, _, _ = call(server, rng.choice(["/v1/completions", "/v1/chat/completions"]), raw)
        assert status in (200, 400, 404), raw
    wait_until(lambda: engine.idle)


def test_a_full_queue_and_a_limit_passed(server, engine, model, monkeypatch):
    monkeypatch.setattr(engine, "_most_waiting", 0)
    status, headers, answer = call(server, "/v1/completions", OK)
    assert (status, headers["Retry-After"]) == (429, "1")
    assert "requests are waiting, as many as may" in answer["error"]["message"]


class Broken:
    """Stands for an engine: never done, or failing."""

    def __init__(self, failure=None):
        self.layout, self.waiting, self.running, self.failure = LAYOUT, 0, 0, failure
        self.tickets, self.cancelled = [], []

    idle = property(lambda self: not self.tickets)

    def submit(self, request):
        self.tickets.append(type("Ticket", (), {"finish": None})())
        return self.tickets[-1]

    def cancel(self, ticket):
        self.cancelled.append(ticket)

    def turn(self):
        if self.failure:
            raise self.failure
        time.sleep(0.001)
        return []


def test_limits_and_failures_are_told(model, caplog):
    slow = Broken()
    with served.serving(make_app(Worker(slow), model, Limits(first_token=0.05, body=0.05))) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=PATIENCE)
        with contextlib.closing(connection):
            connection.putrequest("POST", "/v1/completions")
            connection.putheader("Content-Length", "100")
            connection.endheaders(b'{"prompt"')
            response = connection.getresponse()
            assert response.status == 408
            assert b"the body has not come within 0.05 seconds" in response.read()
        status, _, answer = call(server, "/v1/completions", OK)
        assert status == 504
        assert answer["error"]["message"] == "the first token has not come within 0.05 seconds"
        _, _, events = call(server, "/v1/completions", OK | {"stream": True})
        assert "has not come within 0.05 seconds" in events
        assert slow.cancelled == slow.tickets
    with served.serving(make_app(Worker(Broken(MemoryError("none left"))), model, Limits())) as server:
        assert call(server, "/v1/completions", OK)[0] == 503
        assert call(server, "/v1/completions", OK)[2]["error"]["message"].startswith("the engine has failed")
        assert call(server, "/health", b"", "GET")[0] == 503
    assert "the engine has failed" in caplog.text


def test_stopping_lets_answers_end(engine, model, client, alone):
    # The first server's worker sleeps meanwhile: nothing tells it of the news.
    worker = Worker(engine)
    with served.serving(make_app(worker, model, Limits())) as server, openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as client:  # fmt: skip
        stream = complete(client, 11, stream=True)
        first = next(iter(stream))
        server.should_exit = True
        rest = list(stream)
    assert "".join(piece.choices[0].text for piece in [first, *rest]) == text_of(alone[11])
    assert not worker._thread.is_alive()


def test_script_refuses_in_one_sentence(capsys):
    assert load_script("serve").main(["--slots", "0"]) == 2
    assert capsys.readouterr().err == "serve: slots=0; an engine has 1 or more\n"
