"""Tokens to text as they come: never half a character, never a part of a stop string."""

import pathlib

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def load_tokenizer(directory: str | pathlib.Path) -> Tokenizer | None:
    """Reads `tokenizer.json` of a checkpoint directory; None where it has none."""
    path = pathlib.Path(directory) / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.is_file() else None


class RowText:
    """The text of one sequence so far, and whether it has ended.

    Text that could be the beginning of a stop string is held back until it is known not to be.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), end_token: int | None = None):
        """Starts empty; `end_token` or the first of `stop` to appear ends it, and neither is part of the text."""
        if "" in stop:
            raise ValueError("a stop string is empty; it must hold a character or more")
        self._tokenizer, self._stop, self._end_token = tokenizer, stop, end_token
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._held = ""
        self.ended = False

    def feed(self, token: int) -> str:
        """Takes the next token and returns the text that is now certain."""
        if self.ended:
            return ""
        if token == self._end_token:
            return self.flush()
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = self._held[: min(found)]
            return self.flush()
        keep = max((self._overlap(stop) for stop in self._stop), default=0)
        out, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return out

    def flush(self) -> str:
        """Ends the text and returns what was held back."""
        out, self._held, self.ended = self._held, "", True
        return out

    def _overlap(self, stop: str) -> int:
        """How many last characters held could begin `stop`."""
        return next((n for n in range(len(stop) - 1, 0, -1) if self._held.endswith(stop[:n])), 0)


class RowIds:
    """Like RowText for a caller who speaks token ids: each token is its number and a space."""

    def __init__(self, end_token: int | None = None):
        """Starts empty; `end_token` ends it and is not part of it."""
        self._end_token = end_token
        self.ended = False

    def feed(self, token: int) -> str:
        """Takes the next token and returns it as text."""
        self.ended = self.ended or token == self._end_token
        return "" if self.ended else f"{token} "

    def flush(self) -> str:
        """Ends it; nothing is ever held back."""
        self.ended = True
        return ""
