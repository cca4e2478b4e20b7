"""The generation engine: requests of any lengths and settings share a fixed batch, come and leave as they will.

`Engine.turn` is the heart: it sends the device one chunk of the prompt that is next and one step of all slots, then
reads what the turn before has made. Requests do not know of each other: the tokens, and their log-probabilities to the
bit, are those a request gets alone.
"""

import collections
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from v41jax import sampling, slots
from v41jax.config import Config
from v41jax.model import Params
from v41jax.sampling import Made, Sampling
from v41jax.slots import Chunk, Layout, Programs
from v41jax.text import RowIds

GREEDY = Sampling()


class Reader(Protocol):
    """Reads the tokens of one answer as they come: `text.RowText`, `text.RowIds`, `chat.AnswerText`."""

    @property
    def ended(self) -> bool:
        """Whether nothing more belongs to the answer."""
        ...

    def feed(self, token: int) -> Any:
        """Takes the next token; returns what is now certain."""
        ...

    def flush(self) -> Any:
        """Ends the answer; returns what was held back."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What one caller wants."""

    prompt: Sequence[int]  # token ids
    max_new_tokens: int
    settings: Sampling = GREEDY
    seed: int = 0  # below 2^32; the same seed gives the same tokens, whatever else is served
    reader: Callable[[], Reader] = RowIds  # makes what reads the answer, and ends it

    def check(self, cfg: Config, layout: Layout):
        """Raises ValueError for a request that this model or engine cannot serve."""
        if not len(self.prompt):
            raise ValueError("the prompt is empty; it needs a token or more")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}; it must be 1 or more")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}; legal are 0 to {2**32 - 1}")
        wrong = [token for token in self.prompt if not 0 <= token < cfg.vocab_size]
        if wrong:
            raise ValueError(f"the prompt holds token id {wrong[0]}; legal are 0 to {cfg.vocab_size - 1}")
        needed = len(self.prompt) + self.max_new_tokens
        if needed > layout.capacity:
            raise ValueError(
                f"a prompt of {len(self.prompt)} tokens and {self.max_new_tokens} new ones need {needed} positions;"
                f" a sequence may hold capacity={layout.capacity}"
            )


class Token(NamedTuple):
    """A token made."""

    id: int
    logprob: float  # ln of the model's own probability
    best: list[tuple[int, float]]  # the best tokens and theirs, as many as the request asks for
    text: Any  # what its reader is now certain of


class Update(NamedTuple):
    """What a turn brought a request."""

    ticket: "Ticket"
    tokens: list[Token]
    finish: str | None  # "stop", "length" or "cancelled"; then no more updates come
    rest: Any  # what the reader had held back, when "length" ends it; else None


class Ticket:
    """A request in the engine. Only the engine changes it."""

    def __init__(self, request: Request):
        """Starts without a token."""
        self.request = request
        self.reader = request.reader()
        self.made = 0  # tokens read
        self.owed = request.max_new_tokens  # at most so many are still to be sent for
        self.finish: str | None = None
        self.cancelled = False


class Busy(RuntimeError):
    """The queue is full."""


@dataclasses.dataclass
class Counts:
    """What an engine has done since it was made."""

    prompt_tokens: int = 0
    made_tokens: int = 0
    chunks: int = 0
    steps: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by reason


class Engine:
    """Serves requests from a fixed batch of slots.

    `submit` and `cancel` may be called from any thread; `turn` from one at a time.
    """

    def __init__(self, params: Params, cfg: Config, layout: Layout, *, most_waiting: int | None = None):
        """Allocates slots. Nothing is compiled before it is needed; `programs.warm()` compiles all there is.

        Raises ValueError for sizes that the model cannot have.
        """
        layout.check(cfg)
        self.cfg, self.layout, self.counts = cfg, layout, Counts()
        self.programs = Programs(params, cfg, layout)
        self._params, self._most_waiting = params, most_waiting
        self._state, self._staged = slots.empty_slots(cfg, layout), slots.empty_staged(cfg, layout)
        self._tickets: list[Ticket | None] = [None] * layout.slots
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._staging: tuple[Ticket, list[Chunk]] | None = None
        self._under_way: list[tuple[Made, dict[int, Ticket]]] = []  # results on their way, and whose rows they are
        self._lock = threading.Lock()  # of the queue

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have left the queue and not finished."""
        return sum(ticket is not None for ticket in self._tickets) + (self._staging is not None)

    @property
    def idle(self) -> bool:
        """Whether a turn would do nothing."""
        return not (self.waiting or self.running or self._under_way)

    def submit(self, request: Request) -> Ticket:
        """Puts a request into the queue.

        Raises:
          ValueError: it cannot be served.
          Busy: the queue is full.
        """
        request.check(self.cfg, self.layout)
        ticket = Ticket(request)
        with self._lock:
            if self._most_waiting is not None and len(self._waiting) >= self._most_waiting:
                raise Busy(f"{len(self._waiting)} requests are waiting, as many as may; try again later")
            self._waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket):
        """Ends a request at the next turn, wherever it stands; its slot is free then. Nothing, if it has finished."""
        ticket.cancelled = True

    def turn(self) -> list[Update]:
        """Does one turn; returns what the turn before has brought, and the requests that were cancelled."""
        updates = self._drop_cancelled()
        begun = [*self._prefill(), *self._decode()]
        for made, rows in self._under_way:
            updates += self._read(made, rows)
        self._under_way = begun
        return updates

    def run(self, requests: Sequence[Request]) -> list[list[Token]]:
        """Serves requests to their ends and returns the tokens of each."""
        tickets = [self.submit(request) for request in requests]
        tokens = {id(ticket): [] for ticket in tickets}
        while not self.idle:
            for update in self.turn():
                tokens[id(update.ticket)] += update.tokens
        return [tokens[id(ticket)] for ticket in tickets]

    def _finish(self, ticket: Ticket, reason: str):
        ticket.finish = reason
        self.counts.finished[reason] += 1
        if ticket in self._tickets:
            self._tickets[self._tickets.index(ticket)] = None

    def _drop_cancelled(self) -> list[Update]:
        with self._lock:
            gone = [ticket for ticket in self._waiting if ticket.cancelled]
            if gone:
                self._waiting = collections.deque(ticket for ticket in self._waiting if not ticket.cancelled)
        gone += [ticket for ticket in self._tickets if ticket is not None and ticket.cancelled]
        if self._staging is not None and self._staging[0].cancelled:
            gone.append(self._staging[0])
            self._staging, self._staged = None, self.programs["clear"](self._staged)
        for ticket in gone:
            self._finish(ticket, "cancelled")
        return [Update(ticket, [], "cancelled", None) for ticket in gone]

    def _prefill(self):
        """Sends one chunk of the prompt that is next, if a slot is free for it."""
        if self._staging is None and None in self._tickets:
            with self._lock:
                ticket = self._waiting.popleft() if self._waiting else None
            if ticket is not None:
                prompt = ticket.request.prompt
                chunks = slots.plan_chunks(prompt, cfg=self.cfg, prefill_chunk=self.layout.prefill_chunk)
                self._staging = ticket, chunks
        if self._staging is None:
            return
        ticket, chunks = self._staging
        chunk = chunks.pop(0)
        logits, self._staged = self.programs[chunk.kind](
            self._params, self._staged, chunk.tokens_1T, np.array([chunk.length], np.int32)
        )
        self.counts.chunks += 1
        if chunks:
            return
        slot = self._tickets.index(None)
        rows = sampling.rows([ticket.request.settings], sampling.row_keys(ticket.request.seed, 1))
        ticket.owed -= 1
        made, self._state = self.programs["admit"](
            self._state, self._staged, logits, rows, np.int32(slot), np.int32(ticket.owed)
        )
        self._tickets[slot] = ticket
        self._staging, self._staged = None, self.programs["clear"](self._staged)
        self.counts.prompt_tokens += len(ticket.request.prompt)
        yield made, {0: ticket}

    def _decode(self):
        """Sends a step of all slots, if one of them has tokens to make that no step under way makes for certain."""
        rows = {row: ticket for row, ticket in enumerate(self._tickets) if ticket is not None}
        if not any(ticket.owed > 0 for ticket in rows.values()):
            return
        goes_on_B = np.array([ticket is not None for ticket in self._tickets])
        chance = np.float32(self.layout.least_chance)
        made, self._state = self.programs["step"](self._params, self._state, goes_on_B, chance)
        for ticket in rows.values():
            ticket.owed -= 1
        self.counts.steps += 1
        yield made, rows

    def _read(self, made: Made, rows: dict[int, Ticket]) -> list[Update]:
        """Waits for results and gives them to their readers."""
        token_BT, logprob_BT, best_BTA, best_logprob_BTA = jax.device_get(made)
        updates = []
        for row, ticket in rows.items():
            count, tokens, rest = int(np.sum(token_BT[row] >= 0)), [], None
            ticket.owed -= max(0, count - 1)
            for column in range(0 if ticket.finish else count):
                asked = ticket.request.settings.alternatives
                best = zip(
                    best_BTA[row, column, :asked].tolist(),
                    best_logprob_BTA[row, column, :asked].tolist(),
                    strict=True,
                )
                token = int(token_BT[row, column])
                text = ticket.reader.feed(token)
                tokens.append(Token(token, float(logprob_BT[row, column]), list(best), text))
                if ticket.reader.ended:
                    self._finish(ticket, "stop")
                    break
            ticket.made += len(tokens)
            if ticket.finish is None and ticket.made == ticket.request.max_new_tokens:
                self._finish(ticket, "length")
                rest = ticket.reader.flush()
            self.counts.made_tokens += len(tokens)
            if tokens:
                updates.append(Update(ticket, tokens, ticket.finish, rest))
        return updates
