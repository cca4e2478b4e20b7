"""Puts the engine and the server to work far longer than tests may: many requests, long contexts, many callers.

Each case prints its figures and raises where an answer is wrong. The model is random and small: figures are of this
machinery, not of a model.
"""

import argparse
import asyncio
import dataclasses
import json
import random
import resource
import sys
import time

import jax
import numpy as np

from v41jax import config, load_checkpoint, memory, model
from v41jax.assets import BUILT_IN
from v41jax.engine import Engine
from v41jax.sampling import Sampling
from v41jax.slots import Layout
from v41jax.tickets import Request

LONG = 1 << 18  # positions of the model for long contexts


def peak() -> str:
    """The most memory this process has held."""
    return f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB at the peak"


def tiny(positions: int = 8192):
    """The tiny model that ships, its weights packed, with room for so many positions."""
    cfg, params = load_checkpoint(BUILT_IN, dtype="float32")
    return dataclasses.replace(cfg, max_position_embeddings=positions), params


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    """Draws a prompt."""
    return rng.integers(3, config.tiny.vocab_size, length).tolist()


def mixed(number: int, longest: int) -> list[Request]:
    """Requests with prompts of 1 to `longest` tokens, greedy and drawn."""
    rng, requests = np.random.default_rng(0), []
    for seed in range(number):
        settings = Sampling(temperature=1.0, top_k=40) if seed % 3 == 2 else Sampling()
        length, tokens = int(np.exp(rng.uniform(0, np.log(longest)))), int(rng.integers(1, 33))
        requests.append(Request(prompt=prompt_of(rng, length), max_new_tokens=tokens, settings=settings, seed=seed))
    return requests


def batch():
    """64 mixed requests through 8 slots, and one by one; then 1000 turns of coming, leaving, cancelling."""
    cfg, params = tiny()
    engine = Engine(params, cfg, Layout(slots=8, capacity=4096, prefill_chunk=256))
    engine.warm()
    requests, traces, run = mixed(64, 4000), [], model.run
    model.run = lambda *args, **static: traces.append(static) or run(*args, **static)
    started = time.perf_counter()
    together = engine.run(requests)
    middle = time.perf_counter()
    alone = [engine.run([request])[0] for request in requests]
    ended = time.perf_counter()
    assert together == alone, "a batch changes an answer"
    tokens = sum(map(len, alone)), sum(len(request.prompt) for request in requests)
    print(f"64 requests, {tokens[1]} prompt and {tokens[0]} new tokens: {middle - started:.1f} s in a batch of 8,")
    print(f"  {ended - middle:.1f} s one by one; tokens and log-probabilities identical to the bit")

    rng, tickets, said = random.Random(1), {}, {}
    for _ in range(1000):
        if rng.random() < 0.3:
            number = rng.randrange(64)
            tickets[engine.submit(requests[number])] = number
        if tickets and rng.random() < 0.1:
            engine.cancel(rng.choice(list(tickets)))
        for update in engine.turn():
            said[update.ticket] = said.get(update.ticket, []) + update.tokens
    while not engine.idle:
        for update in engine.turn():
            said[update.ticket] = said.get(update.ticket, []) + update.tokens
    for ticket, number in tickets.items():
        assert ticket.finish is not None, "a request is left behind"
        assert said[ticket] == alone[number][: len(said[ticket])], "a neighbour changed an answer"
    assert not traces, f"{len(traces)} traces after warm-up"
    ends = {reason: sum(ticket.finish == reason for ticket in tickets) for reason in ("length", "cancelled")}
    print(f"1000 turns: {len(tickets)} requests, {ends}, every slot free, no trace after warm-up; {peak()}")


def long_context(length: int, chunk: int):
    """A prompt of `length` tokens, and what a step costs behind 4K and behind 128K of them."""
    cfg, params = tiny(LONG)
    layout = Layout(slots=1, capacity=length + 128, prefill_chunk=chunk)
    engine = Engine(params, cfg, layout)
    engine.warm()
    caches, scratch = memory.cache_bytes(cfg, layout), engine.programs.scratch_bytes()
    print(f"caches {caches / 1e6:.1f} MB, programs for working {scratch / 1e6:.1f} MB")
    prompt = prompt_of(np.random.default_rng(0), length)
    ticket, started, first = engine.submit(Request(prompt=prompt, max_new_tokens=64)), time.perf_counter(), 0.0
    while not engine.idle:
        for update in engine.turn():
            first = first or time.perf_counter() - started
            assert all(np.isfinite(token.logprob) for token in update.tokens)
    step = (time.perf_counter() - started - first) / 63
    print(
        f"{length} tokens: first token after {first:.1f} s ({length / first:.0f} tokens/s), then {1e3 * step:.2f} ms a"
    )
    print(f"  step with {length + 128} tokens of room; {ticket.made} tokens made; {peak()}")


def steps():
    """Milliseconds of a step behind 4K and behind 128K tokens, each in room for that."""
    cfg, params = tiny(LONG)
    took = {}
    for length in (4096, 131072):
        engine = Engine(params, cfg, Layout(slots=1, capacity=length + 256, prefill_chunk=256))
        # Entries of zeros cost what others do; only the length matters.
        cache = engine._state.cache
        at = dataclasses.replace(cache, length_B=cache.length_B + length)
        engine._state = dataclasses.replace(engine._state, cache=at, left_B=engine._state.left_B + 200)
        step, alive, chance = engine.programs["step"], np.ones(1, bool), np.float32(0)
        times = []
        for _ in range(200):
            started = time.perf_counter()
            made, engine._state = step(params, engine._state, alive, chance)
            jax.block_until_ready(made)
            times.append(time.perf_counter() - started)
        took[length] = float(np.median(times))
        print(f"{length} tokens: {1e3 * took[length]:.2f} ms a step, the median of 200")
    print(f"ratio {took[131072] / took[4096]:.2f}")


def load(url: str, callers: int, seconds: float):
    """Streams to many callers at once, each again and again, and compares every answer with the first of its kind."""
    import openai  # of the extra `dev`

    rng = np.random.default_rng(0)
    prompts = [prompt_of(rng, int(rng.integers(1, 60))) for _ in range(50)]
    asked = [{"prompt": p, "max_tokens": 24, "temperature": i % 2, "seed": 5} for i, p in enumerate(prompts)]

    async def answer(client, body):
        parts, tokens = [], 0
        stream = await client.completions.create(
            model=name, stream=True, stream_options={"include_usage": True}, **body
        )  # fmt: skip
        async for piece in stream:
            parts += [choice.text for choice in piece.choices]
            tokens = piece.usage.completion_tokens if piece.usage else tokens
        return "".join(parts), tokens

    async def caller(client, number, want, end, counts):
        while time.monotonic() < end:
            kind = number % len(asked)
            counts.append(await answer(client, asked[kind]) == want[kind])
            number += 7

    async def everyone():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as client:
            nonlocal name
            name = (await client.models.list()).data[0].id
            want, counts = [await answer(client, body) for body in asked], []
            end = time.monotonic() + seconds
            await asyncio.gather(*(caller(client, number, want, end, counts) for number in range(callers)))
            return counts

    name = ""
    counts = asyncio.run(everyone())
    assert all(counts), f"{counts.count(False)} answers of {len(counts)} are wrong"
    print(f"{callers} callers for {seconds:g} s: {len(counts)} streams, all whole and right")


def fuzz(url: str, number: int):
    """Sends bodies that are mostly wrong; anything but an answer or a 4xx is a fault."""
    import http.client

    rng, statuses = random.Random(0), {}
    host = url.removeprefix("http://")
    values = [
        None,
        True,
        -1,
        0,
        2,
        1e308,
        10**30,
        "",
        "x",
        "\ud83d",
        "\x00",
        [],
        {},
        [1],
        ["x"],
        [[5]],
        [None],
        {"a": 1},
    ]
    names = (
        "n stop logprobs top_logprobs temperature top_p stream seed model echo messages prompt max_tokens top_k tools"
    )
    plain = [{"prompt": "x", "max_tokens": 1}, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}]
    connection = http.client.HTTPConnection(host, timeout=120)
    for _ in range(number):
        body = dict(rng.choice(plain))
        for _ in range(rng.randint(0, 3)):
            body[rng.choice(names.split())] = rng.choice(values)
        raw = json.dumps(body).encode()
        for _ in range(rng.choice([0, 0, 0, 1, 5])):
            at = rng.randrange(len(raw))
            raw = raw[:at] + bytes([rng.randrange(256)]) * rng.randint(0, 3) + raw[at + rng.randint(0, 3) :]
        connection.request("POST", rng.choice(["/v1/completions", "/v1/chat/completions"]), raw)
        if rng.random() < 0.02:  # and some do not wait for the answer
            connection.close()
            continue
        response = connection.getresponse()
        response.read()
        statuses[response.status] = statuses.get(response.status, 0) + 1
        assert response.status < 500, raw
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    print(f"{number} requests: {dict(sorted(statuses.items()))}, then healthy")


def main(argv=None) -> int:
    """Runs one case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("case", choices=("batch", "long", "steps", "load", "fuzz"))
    parser.add_argument("--length", type=int, default=200_000, help="long: tokens of the prompt")
    parser.add_argument("--chunk", type=int, default=1024, help="long: prompt tokens a call")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="load, fuzz: a server that runs (serve.py)")
    parser.add_argument("--callers", type=int, default=200, help="load: streams at once")
    parser.add_argument("--seconds", type=float, default=120, help="load: how long")
    parser.add_argument("--number", type=int, default=10_000, help="fuzz: requests")
    args = parser.parse_args(argv)
    if args.case == "batch":
        batch()
    elif args.case == "long":
        long_context(args.length, args.chunk)
    elif args.case == "steps":
        steps()
    elif args.case == "load":
        load(args.url, args.callers, args.seconds)
    else:
        fuzz(args.url, args.number)
    return 0


if __name__ == "__main__":
    sys.exit(main())
