"""What the engine made, in OpenAI's form: whole answers and pieces of streams."""

import dataclasses
from typing import Any

from tokenizers import Tokenizer

from v41jax.serving.protocol import Call
from v41jax.tickets import Token, Update

Json = dict[str, Any]


@dataclasses.dataclass
class Choice:
    """One answer as it comes."""

    index: int
    content: str = ""
    reasoning: str = ""
    tokens: int = 0
    finish: str | None = None
    logprobs: list[Json] = dataclasses.field(default_factory=list)


class Answers:
    """Builds the response to one call."""

    def __init__(self, call: Call, tokenizer: Tokenizer, *, id: str, created: int, model: str, end: int | None):
        """Starts with empty choices; `end` is the token that ends an answer and is no part of it."""
        self._call, self._tokenizer, self._end = call, tokenizer, end
        self._common = {"id": id, "created": created, "model": model}
        self.reused = 0  # prompt tokens that were taken from known prefixes
        self.choices = [Choice(index) for index in range(len(call.requests))]

    @property
    def finished(self) -> bool:
        """Whether all answers are whole."""
        return all(choice.finish is not None for choice in self.choices)

    def add(self, index: int, update: Update) -> Choice:
        """Adds what a turn brought one answer; returns a Choice of that alone."""
        choice, new = self.choices[index], Choice(index, finish=update.finish)
        before = len(choice.content)
        if not choice.tokens:
            self.reused += update.ticket.reused
        for token in update.tokens:
            if self._call.logprobs and token.id != self._end:
                new.logprobs.append(self._logprob(token, before + len(new.content)))
            self._join(new, token.text)
        if update.rest is not None:
            self._join(new, update.rest)
        choice.content, choice.reasoning = choice.content + new.content, choice.reasoning + new.reasoning
        choice.tokens, choice.finish = choice.tokens + len(update.tokens), new.finish
        choice.logprobs += new.logprobs
        return new

    def whole(self) -> Json:
        """The response to a call that does not stream."""
        kind = "chat.completion" if self._call.chat else "text_completion"
        choices = [self._choice(choice, "message") for choice in self.choices]
        return {**self._common, "object": kind, "choices": choices, "usage": self.usage()}

    def opening(self) -> list[Json]:
        """What a stream starts with: in a chat, who speaks."""
        if not self._call.chat:
            return []
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk([{"index": c.index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for c in self.choices
        ]

    def piece(self, new: Choice) -> Json | None:
        """The piece of a stream for what `add` returned; None if there is nothing to say yet."""
        if not (new.content or new.reasoning or new.logprobs or new.finish):
            return None
        return self._chunk([self._choice(new, "delta")])

    def closing(self) -> list[Json]:
        """What a stream ends with: the usage, if it was asked for."""
        return [{**self._chunk([]), "usage": self.usage()}] if self._call.usage else []

    def usage(self) -> Json:
        """Counts tokens."""
        made = sum(choice.tokens for choice in self.choices)
        prompt = self._call.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": self.reused},
        }

    def _chunk(self, choices: list[Json]) -> Json:
        kind = "chat.completion.chunk" if self._call.chat else "text_completion"
        return {**self._common, "object": kind, "choices": choices}

    def _choice(self, choice: Choice, place: str) -> Json:
        out: Json = {"index": choice.index, "finish_reason": choice.finish, "logprobs": None}
        if not self._call.chat:
            out["text"] = choice.content
            if self._call.logprobs:
                out["logprobs"] = {
                    "tokens": [entry["token"] for entry in choice.logprobs],
                    "token_logprobs": [entry["logprob"] for entry in choice.logprobs],
                    "top_logprobs": [
                        {best["token"]: best["logprob"] for best in entry["top_logprobs"]} for entry in choice.logprobs
                    ],
                    "text_offset": [entry["offset"] for entry in choice.logprobs],
                }
            return out
        said: Json = {"role": "assistant"} if place == "message" else {}
        if choice.content or place == "message":
            said["content"] = choice.content
        if choice.reasoning:
            said["reasoning_content"] = choice.reasoning
        if self._call.logprobs:
            content = [{name: entry[name] for name in entry if name != "offset"} for entry in choice.logprobs]
            out["logprobs"] = {"content": content, "refusal": None}
        return {**out, place: said}

    def _join(self, choice: Choice, text: Any):
        reasoning, content = text if self._call.chat else ("", text)
        choice.reasoning, choice.content = choice.reasoning + reasoning, choice.content + content

    def _logprob(self, token: Token, offset: int) -> Json:
        best = [self._named(id, logprob) for id, logprob in token.best]
        return {**self._named(token.id, token.logprob), "top_logprobs": best, "offset": offset}

    def _named(self, id: int, logprob: float) -> Json:
        text = self._tokenizer.decode([id], skip_special_tokens=False)
        if "\ufffd" in text:  # a part of a character: what the vocabulary calls it, which no other token is called
            return {"token": self._tokenizer.id_to_token(id), "logprob": logprob, "bytes": None}
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
