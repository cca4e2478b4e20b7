"""Conversations to prompts in the released encoding, and answers back to reasoning and content.

Special tokens are not text: what a message says is encoded without them, so no message can end a turn or open one.
"""

import dataclasses
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

from v41jax.text import RowText

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, THOUGHT = "<think>", "</think>"

EFFORTS = {"low": 25, "high": 50, "xhigh": 75, "max": 100}
EFFORT_LINE = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
ROLES = ("system", "user", "assistant")


@dataclasses.dataclass(frozen=True)
class Message:
    """One turn. Only an assistant's has reasoning."""

    role: str  # of ROLES
    content: str
    reasoning: str = ""

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f"role={self.role!r}; legal are {', '.join(ROLES)}")
        if self.reasoning and self.role != "assistant":
            raise ValueError(f"a message of role {self.role!r} has reasoning; only an assistant's can")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Style:
    """How the assistant is to answer."""

    thinking: bool = False  # it reasons before it answers
    effort: int | str = "high"  # how thoroughly: 1 to 100, or a key of EFFORTS; said only if it thinks
    keep_reasoning: bool = False  # of turns before the last user's, which is dropped otherwise

    def __post_init__(self):
        effort = EFFORTS.get(self.effort) if isinstance(self.effort, str) else self.effort
        if type(effort) is not int or not 1 <= effort <= 100:
            raise ValueError(f"effort={self.effort!r}; it must be 1 to 100, or one of {', '.join(EFFORTS)}")

    @property
    def effort_line(self) -> str:
        """What the prompt says of it."""
        effort = EFFORTS[self.effort] if isinstance(self.effort, str) else self.effort
        return EFFORT_LINE.format(effort) if self.thinking else ""


CHAT = Style()


def prompt_parts(messages: Sequence[Message], style: Style = CHAT) -> list[tuple[bool, str]]:
    """Lays a conversation out as special tokens and text.

    Args:
      messages: the turns, oldest first, the last of a user, or of the system behind another: it is answered next.
        Turns of a user that follow each other become one, an empty line between them.
      style: of the answer.
    Returns:
      (is a special token, its text) in order, joined the released prompt; no two parts of text stand together.
    Raises:
      ValueError: nothing to answer.
    Source: `encode_messages` of the release's encoding, without tools, images and tasks.
    """
    turns: list[Message] = []
    for message in messages:
        if turns and message.role == turns[-1].role == "user":
            turns[-1] = Message("user", f"{turns[-1].content}\n\n{message.content}")
        else:
            turns.append(message)
    asks = [turn.role == "user" or (turn.role == "system" and i > 0) for i, turn in enumerate(turns)]
    if not turns or not asks[-1]:
        last = f"ends with one of role {turns[-1].role!r}" if turns else "is empty"
        raise ValueError(f"the conversation {last}; it must end with a message of role 'user', which is answered next")

    out = [(True, BEGIN)]
    if style.thinking and turns[0].role != "system":
        out += [(True, SYSTEM), (False, style.effort_line)]
    for i, turn in enumerate(turns):
        reasons = style.thinking and (style.keep_reasoning or i == len(turns) - 1)
        if turn.role == "assistant":
            if style.thinking and style.keep_reasoning:
                out += [(False, turn.reasoning), (True, THOUGHT)]
            out += [(False, turn.content), (True, END)]
            continue
        first = style.effort_line if i == 0 and turn.role == "system" else ""
        out += [(True, USER if turn.role == "user" else SYSTEM), (False, first + turn.content)]
        if asks[i] and (i == len(turns) - 1 or turns[i + 1].role == "assistant"):
            out += [(True, ASSISTANT), (True, THINK if reasons else THOUGHT)]
    return [part for part in out if part[1]]


def prompt_text(messages: Sequence[Message], style: Style = CHAT) -> str:
    """Returns the prompt as the release writes it; `prompt_ids` is what a model is fed."""
    return "".join(text for _, text in prompt_parts(messages, style))


def prompt_ids(messages: Sequence[Message], tokenizer: Tokenizer, style: Style = CHAT) -> list[int]:
    """Encodes a conversation to token ids.

    What looks like a special token inside a message stays text. Arguments and errors as in `prompt_parts`, and
    ValueError for a tokenizer without the special tokens.
    """
    ids = []
    for special, text in prompt_parts(messages, style):
        ids += [token_id(tokenizer, text)] if special else plain_ids(text, tokenizer)
    return ids


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Returns the id of a special token; ValueError where the tokenizer lacks it."""
    number = tokenizer.token_to_id(token)
    if number is None:
        raise ValueError(f"the tokenizer has no token {token!r}; it is not one of a chat model")
    return number


def plain_ids(text: str, tokenizer: Tokenizer) -> list[int]:
    """Encodes text, and what looks like an added token in it as text too."""
    added = sorted(token.content for token in tokenizer.get_added_tokens_decoder().values())
    inside = "|".join(f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in added if len(token) > 1)
    pieces = re.split(inside, text) if inside else [text]
    return [i for piece in pieces for i in tokenizer.encode(piece, add_special_tokens=False).ids]


class AnswerText:
    """The text of one answer as it comes: reasoning until the thought ends, then content.

    Stop strings end the content only; neither part shows half a character.
    """

    def __init__(self, tokenizer: Tokenizer, style: Style = CHAT, stop: tuple[str, ...] = ()):
        """Starts empty; the end token or a stop string ends it."""
        end = token_id(tokenizer, END)
        self._thought = token_id(tokenizer, THOUGHT)
        self._reasoning, self._content = RowText(tokenizer, (), end), RowText(tokenizer, stop, end)
        self._thinks = style.thinking

    @property
    def ended(self) -> bool:
        """Whether nothing more belongs to the answer."""
        return self._content.ended

    def feed(self, token: int) -> tuple[str, str]:
        """Takes the next token; returns the reasoning and the content that are now certain."""
        if not self._thinks:
            return "", self._content.feed(token)
        if token == self._thought:
            self._thinks = False
            return self._reasoning.flush(), ""
        text = self._reasoning.feed(token)
        if self._reasoning.ended:
            self._content.flush()
        return text, ""

    def flush(self) -> tuple[str, str]:
        """Ends the answer and returns what was held back."""
        return self._reasoning.flush() if self._thinks else "", self._content.flush()
