"""The generation engine: requests of any lengths and settings share a fixed batch, come and leave as they will.

`Engine.turn` is the heart: it sends the device one chunk of the prompt that is next and one step of all slots, then
reads what the turn before has made. Requests do not know of each other: the tokens, and their log-probabilities to the
bit, are those a request gets alone.
"""

import collections
import pathlib
import threading
from collections.abc import Sequence

import jax
import numpy as np

from v41jax import memory, sampling, slots, tree
from v41jax.config import Config
from v41jax.model import Params
from v41jax.prefixes import Prefixes, chunk_names, fingerprint, replay_start
from v41jax.sampling import Made
from v41jax.slots import Chunk, Layout, Programs
from v41jax.tickets import Busy, Counts, Request, Ticket, Token, Update


class Engine:
    """Serves requests from a fixed batch of slots.

    `submit` and `cancel` may be called from any thread; `turn` from one at a time.
    """

    def __init__(
        self,
        params: Params,
        cfg: Config,
        layout: Layout,
        *,
        most_waiting: int | None = None,
        memory_bytes: int | None = None,
    ):
        """Allocates slots; compiles nothing, see `warm`.

        Args:
          params, cfg: the model.
          layout: sizes.
          most_waiting: requests that may be in the queue; None: any number.
          memory_bytes: what weights, caches and programs may take together; None: the device's memory.
        Raises:
          ValueError: sizes that the model cannot have or the memory cannot hold, with the largest capacity that fits.
        """
        layout.check(cfg)
        self._memory_bytes = memory.device_memory() if memory_bytes is None else memory_bytes
        memory.check(cfg, layout, memory=self._memory_bytes, weights=tree.nbytes(params))
        self.cfg, self.layout, self.counts = cfg, layout, Counts()
        self.programs = Programs(params, cfg, layout)
        self._params, self._most_waiting = params, most_waiting
        self._state, self._staged = slots.empty_slots(cfg, layout), slots.empty_staged(cfg, layout)
        self._tickets: list[Ticket | None] = [None] * layout.slots
        self._waiting: collections.deque[Ticket] = collections.deque()
        self._staging: tuple[Ticket, list[Chunk], list[str]] | None = None  # chunks to come, names of all whole ones
        self._under_way: list[tuple[Made, dict[int, Ticket]]] = []  # results on their way, and whose rows they are
        self._lock = threading.Lock()  # of the queue
        self.prefixes = Prefixes(layout.prefix_bytes)
        self._token_map = np.asarray(params["token_map"]) if cfg.engram_layer_ids else None

    def warm(self, kinds: Sequence | None = None):
        """Compiles all programs there are, or those named, before a request needs them.

        Raises:
          ValueError: what they need for working does not fit beside weights and caches.
        """
        self.programs.warm(kinds)
        memory.check(
            self.cfg, self.layout, memory=self._memory_bytes, weights=tree.nbytes(self._params),
            scratch=self.programs.scratch_bytes(),
        )  # fmt: skip

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
                self._staging = self._stage(ticket)
        if self._staging is None:
            return
        ticket, chunks, names = self._staging
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
        self._remember(names)
        self._staging, self._staged = None, self.programs["clear"](self._staged)
        self.counts.prompt_tokens += len(ticket.request.prompt)
        yield made, {0: ticket}

    def _stage(self, ticket: Ticket) -> tuple[Ticket, list[Chunk], list[str]]:
        """Plans a prompt's chunks, and puts what is known of its beginning into the staged row."""
        prompt, width = ticket.request.prompt, self.layout.prefill_chunk
        chunks = slots.plan_chunks(prompt, cfg=self.cfg, prefill_chunk=width)
        if not self.layout.prefix_bytes:
            return ticket, chunks, []
        names = chunk_names(prompt, [chunk.mode for chunk in chunks], width)
        blocks = self.prefixes.find(names)
        start = replay_start(len(prompt), len(blocks) * width, width, self.cfg)
        if start == 0:
            return ticket, chunks, names
        for number, block in enumerate(blocks):
            self._staged = self.programs["put"](self._staged, self._planes(block), np.int32(number * width))
        history = self.cfg.engram_max_ngram_size - 1
        ngram_1N = np.zeros((1, 0), np.int32)
        if self._token_map is not None:
            ngram_1N = self._token_map[np.asarray(prompt[start - history : start])][None]
        self._staged = self.programs["resume"](
            self._staged, np.int32(start), np.int32(len(blocks) * width), ngram_1N
        )  # fmt: skip
        ticket.reused = start
        self.counts.reused_tokens += start
        return ticket, chunks[start // width :], names

    def _remember(self, names: list[str]):
        """Keeps the blocks of the staged prompt that are not known yet."""
        for number, name in enumerate(names):
            if name not in self.prefixes:
                block = self.programs["take"](self._staged.cache, np.int32(number * self.layout.prefill_chunk))
                planes = jax.tree.leaves(jax.device_get(block))
                self.prefixes.add(name, b"".join(plane.tobytes() for plane in planes))

    def _planes(self, block: bytes):
        """Turns the bytes of a block into its arrays."""
        described, first, planes = self.programs.block, 0, []
        for plane in jax.tree.leaves(described):
            count = int(np.prod(plane.shape))
            planes.append(np.frombuffer(block, plane.dtype, count, first).reshape(plane.shape))
            first += planes[-1].nbytes
        return jax.tree.unflatten(jax.tree.structure(described), planes)

    def save_prefixes(self, directory: str | pathlib.Path):
        """Writes the prefixes that are known to a directory."""
        self.prefixes.save(directory, fingerprint(self._params, self.cfg, self.layout.prefill_chunk))

    def load_prefixes(self, directory: str | pathlib.Path) -> int:
        """Reads prefixes that an engine of the same weights, programs and devices saved; returns how many blocks."""
        block_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.programs.block))
        print_ = fingerprint(self._params, self.cfg, self.layout.prefill_chunk)
        return self.prefixes.load(directory, print_, block_bytes)

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
