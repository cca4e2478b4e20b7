"""The endpoint: routes, streams, timeouts, and what a caller hears when something is wrong."""

import asyncio
import contextlib
import dataclasses
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from v41jax.serving import metrics
from v41jax.serving.answers import Answers
from v41jax.serving.fields import BadRequest, parse_object
from v41jax.serving.protocol import Call, Model, parse_chat, parse_completion
from v41jax.serving.worker import Failed, Worker
from v41jax.tickets import Busy, Ticket, Update

BYTES_A_TOKEN = 16  # of a body: no sensible prompt takes more, escaped
SMALLEST_LIMIT = 1 << 20  # bytes of a body that are read whatever the capacity


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """How long a caller may wait, and be waited for, in seconds."""

    body: float = 30.0  # for all of the body to come
    first_token: float = 60.0  # from the call to the first token of every answer
    answer: float = 600.0  # from the call to its end


class TooLate(Exception):
    """A limit has passed."""


def make_app(worker: Worker, model: Model, limits: Limits) -> Starlette:
    """Makes the ASGI application; the worker is stopped when the application shuts down."""
    server = Server(worker, model, limits)

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(worker.stop)

    routes = [
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.chat_completions, methods=["POST"]),
        Route("/v1/models", server.models, methods=["GET"]),
        Route("/health", server.health, methods=["GET"]),
        Route("/metrics", server.metrics, methods=["GET"]),
    ]
    handlers: dict[Any, Any] = {HTTPException: refuse_http}
    return Starlette(routes=routes, lifespan=lifespan, exception_handlers=handlers)


async def refuse_http(request: Request, error: Exception) -> Response:
    """Says what is wrong with a path or a method."""
    assert isinstance(error, HTTPException)
    return refusal(error.status_code, f"{request.method} {request.url.path}: {error.detail}")


def refusal(status: int, message: str, param: str | None = None, headers=None) -> JSONResponse:
    """An error in OpenAI's form."""
    kind = "invalid_request_error" if 400 <= status < 500 and status != 429 else "server_error"
    return JSONResponse(error_body(message, kind, param), status, headers)


def error_body(message: str, kind: str, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}


class Server:
    """The handlers of the routes."""

    def __init__(self, worker: Worker, model: Model, limits: Limits):
        """Keeps what they need."""
        self._worker, self._model, self._limits, self._counts = worker, model, limits, metrics.Counts()
        self._most_bytes = max(SMALLEST_LIMIT, BYTES_A_TOKEN * model.layout.capacity)
        self._created = int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, parse_completion)

    async def chat_completions(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, parse_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        entry = {"id": self._model.name, "object": "model", "created": self._created, "owned_by": "v41jax"}
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the engine serves, 503 once it has failed."""
        failure = self._worker.failure
        if failure is not None:
            return refusal(503, f"the engine has failed: {failure!r}")
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        """GET /metrics, in the text format of Prometheus."""
        return PlainTextResponse(metrics.text(self._worker, self._counts), media_type=metrics.MEDIA_TYPE)

    async def _answer(self, request: Request, parse) -> Response:
        started = time.monotonic()
        try:
            body = await self._body(request)
            call = await run_in_threadpool(lambda: parse(parse_object(body), self._model))
            watch = Watch(self._worker, call, started, self._limits)
        except BadRequest as error:
            return self._refuse(error.status, str(error), error.param)
        except ClientDisconnect:
            return Response(status_code=400)  # nobody hears it
        except Busy as error:
            return self._refuse(429, str(error), headers={"Retry-After": "1"})
        except Failed as error:
            return self._refuse(503, str(error))
        answers = Answers(
            call, self._model.tokenizer, id=f"{'chatcmpl' if call.chat else 'cmpl'}-{uuid.uuid4().hex}",
            created=int(time.time()), model=self._model.name, end=self._model.cfg.eos_token_id,
        )  # fmt: skip
        if call.stream:
            return StreamingResponse(self._stream(watch, answers), media_type="text/event-stream")
        gone = asyncio.create_task(_disconnected(request))
        with watch:
            try:
                async for index, update in watch.updates(gone):
                    answers.add(index, update)
            except TooLate as error:
                return self._refuse(504, str(error))
            except Failed as error:
                return self._refuse(503, str(error))
            finally:
                gone.cancel()
        self._counts.responses[200] += 1
        return JSONResponse(answers.whole())

    async def _stream(self, watch: "Watch", answers: Answers) -> AsyncIterator[str]:
        """Yields the events of a stream; leaving it early, as a disconnected client makes us, cancels."""
        self._counts.responses[200] += 1
        with watch:
            try:
                for piece in answers.opening():
                    yield event(piece)
                async for index, update in watch.updates():
                    piece = answers.piece(answers.add(index, update))
                    if piece is not None:
                        yield event(piece)
                for piece in answers.closing():
                    yield event(piece)
                yield "data: [DONE]\n\n"
            except (TooLate, Failed) as error:
                yield event(error_body(str(error), "server_error"))

    def _refuse(self, status: int, message: str, param: str | None = None, headers=None) -> Response:
        self._counts.responses[status] += 1
        return refusal(status, message, param, headers)

    async def _body(self, request: Request) -> bytes:
        parts, size = [], 0
        try:
            async with asyncio.timeout(self._limits.body):
                async for part in request.stream():
                    parts.append(part)
                    size += len(part)
                    if size > self._most_bytes:
                        raise BadRequest(f"the body is over {self._most_bytes} bytes", status=413)
        except TimeoutError:
            raise BadRequest(f"the body has not come within {self._limits.body:g} seconds", status=408) from None
        return b"".join(parts)


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def _disconnected(request: Request):
    """Returns when the caller has gone."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.1)


class Watch:
    """The requests of one call while they are in the engine; leaving its `with` block cancels what is left of them."""

    def __init__(self, worker: Worker, call: Call, started: float, limits: Limits):
        """Puts all requests into the queue, or none.

        Raises Busy and Failed as `Worker.submit` does.
        """
        self._worker, self._started, self._limits = worker, started, limits
        self._queue: asyncio.Queue[tuple[int, Update | None]] = asyncio.Queue()
        self._tickets: list[Ticket] = []
        loop = asyncio.get_running_loop()
        try:
            for index, request in enumerate(call.requests):

                def listener(update: Update | None, index=index):
                    with contextlib.suppress(RuntimeError):  # the loop is closed: the server has stopped
                        loop.call_soon_threadsafe(self._queue.put_nowait, (index, update))

                self._tickets.append(worker.submit(request, listener))
        except (Busy, Failed):
            self.__exit__()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for ticket in self._tickets:
            if ticket.finish is None:
                self._worker.cancel(ticket)

    async def updates(self, gone: asyncio.Task | None = None) -> AsyncIterator[tuple[int, Update]]:
        """Yields (choice, update) until all choices have finished, or `gone` is done.

        Raises:
          TooLate: a limit has passed.
          Failed: the engine has.
        """
        silent, open_ = set(range(len(self._tickets))), set(range(len(self._tickets)))
        while open_:
            limit = self._limits.first_token if silent else self._limits.answer
            left = self._started + limit - time.monotonic()
            next_update = asyncio.ensure_future(self._queue.get())
            waits = {next_update} if gone is None else {next_update, gone}
            try:
                done, _ = await asyncio.wait(waits, timeout=max(0, left), return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not next_update.done():
                    next_update.cancel()
            if gone in done:
                return
            if next_update not in done:
                what = "the first token has" if silent else "the answer has"
                raise TooLate(f"{what} not come within {limit:g} seconds")
            index, update = next_update.result()
            if update is None:
                raise Failed("the engine has failed")
            silent.discard(index)
            if update.finish is not None:
                open_.discard(index)
            yield index, update
