"""What callers and the engine say to each other: requests, tickets, and updates of what was made."""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from v41jax.config import Config
from v41jax.sampling import Sampling
from v41jax.slots import Layout
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
        self.reused = 0  # prompt tokens taken from a known prefix


class Busy(RuntimeError):
    """The queue is full."""


@dataclasses.dataclass
class Counts:
    """What an engine has done since it was made."""

    prompt_tokens: int = 0
    reused_tokens: int = 0  # of them, taken from prefixes
    made_tokens: int = 0
    chunks: int = 0
    steps: int = 0
    finished: collections.Counter = dataclasses.field(default_factory=collections.Counter)  # by reason
