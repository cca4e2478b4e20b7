"""OpenAI's two forms of a question, as requests for the engine; fields that are not served are refused by name."""

import dataclasses
import functools
import math
import random
from typing import Any

from tokenizers import Tokenizer

from v41jax import chat
from v41jax.chat import AnswerText, Message, Style
from v41jax.config import Config
from v41jax.sampling import ALTERNATIVES, Sampling
from v41jax.serving.fields import BadRequest, Fields
from v41jax.slots import Layout
from v41jax.text import RowText
from v41jax.tickets import Request

MOST_CHOICES = 64  # answers to one call
MOST_STOPS, LONGEST_STOP = 16, 256  # strings, and characters of one
COMPLETION_TOKENS = 16  # made for a completion that does not say how many
HOTTEST = 2.0  # temperature
IGNORED = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """What is served."""

    name: str
    cfg: Config
    layout: Layout
    tokenizer: Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What one HTTP request asks."""

    chat: bool
    requests: list[Request]  # one for each choice
    prompt_tokens: int  # of all prompts
    stream: bool
    usage: bool  # ends a stream with the usage
    logprobs: bool


def parse_completion(body: dict[str, Any], model: Model) -> Call:
    """Reads the body of /v1/completions; BadRequest for what cannot be served."""
    fields = Fields(body)
    prompts = [_completion_ids(fields, prompt, model) for prompt in _prompts(fields)]
    alternatives = fields.whole("logprobs", None, 0, ALTERNATIVES)
    most = fields.whole("max_tokens", COMPLETION_TOKENS, 1, model.layout.capacity)
    stops = _stops(fields)
    for name, legal in (("echo", False), ("suffix", ""), ("best_of", 1)):
        fields.only(name, legal)
    read = functools.partial(RowText, model.tokenizer, stops, model.cfg.eos_token_id)
    return _call(fields, model, prompts, [most] * len(prompts), alternatives, read, chat=False)


def parse_chat(body: dict[str, Any], model: Model) -> Call:
    """Reads the body of /v1/chat/completions; BadRequest for what cannot be served."""
    fields = Fields(body)
    effort = fields.text("reasoning_effort", "none")
    if effort not in ("none", *chat.EFFORTS):
        raise fields.wrong("reasoning_effort", f"must be none, {', '.join(chat.EFFORTS)}")
    style = Style() if effort == "none" else Style(thinking=True, effort=str(effort))
    try:
        prompt = chat.prompt_ids(_messages(fields), model.tokenizer, style)
    except BadRequest:
        raise
    except ValueError as error:
        raise BadRequest(str(error), "messages") from None
    room = model.layout.capacity - len(prompt)
    if room < 1:
        fits = f"at most {model.layout.capacity - 1} fit"
        raise BadRequest(f"the conversation has {len(prompt)} tokens; {fits}", "messages")
    most = fields.whole("max_tokens", None, 1, model.layout.capacity)
    most = fields.whole("max_completion_tokens", most or room, 1, model.layout.capacity)
    stops = _stops(fields)
    logprobs, alternatives = fields.flag("logprobs"), fields.whole("top_logprobs", 0, 0, ALTERNATIVES)
    if alternatives and not logprobs:
        raise fields.wrong("top_logprobs", "needs logprobs to be true")
    for name, legal in (("tools", []), ("tool_choice", "none"), ("response_format", {"type": "text"})):
        fields.only(name, legal)
    read = functools.partial(AnswerText, model.tokenizer, style, stops)
    return _call(fields, model, [prompt], [most], alternatives if logprobs else None, read, chat=True)


def _call(fields: Fields, model: Model, prompts, most, alternatives: int | None, read, *, chat: bool) -> Call:
    """Reads what both forms share, and makes the requests."""
    name = fields.text("model", model.name)
    if name != model.name:
        raise BadRequest(f"there is no model {str(name)[:60]!r}; this server has {model.name!r}", "model", status=404)
    settings = Sampling(
        temperature=fields.number("temperature", 1.0, 0, HOTTEST),
        top_p=fields.number("top_p", 1.0, math.ulp(0.0), 1),
        top_k=fields.whole("top_k", 0, 0, 2**31 - 1) or 0,
        alternatives=alternatives or 0,
    )
    seed = fields.whole("seed", None, -(2**63), 2**63 - 1)
    seed = random.getrandbits(32) if seed is None else seed
    choices = fields.whole("n", 1, 1, MOST_CHOICES) or 1
    if choices * len(prompts) > MOST_CHOICES:
        raise fields.wrong("n", f"times {len(prompts)} prompts makes {choices * len(prompts)}; at most {MOST_CHOICES}")
    stream = fields.flag("stream")
    options = fields.take("stream_options", {})
    if not isinstance(options, dict):
        raise fields.wrong("stream_options", "must be an object")
    options = Fields(options, "stream_options.")
    usage = options.flag("include_usage")
    options.only("include_obfuscation", False)
    options.done()
    for penalty in ("presence_penalty", "frequency_penalty"):
        fields.only(penalty, 0)
    fields.only("logit_bias", {})
    for ignored in IGNORED:
        fields.take(ignored)
    fields.done()
    requests = []
    for prompt, tokens in zip(prompts, most, strict=True):
        for choice in range(choices):
            request = Request(
                prompt=prompt, max_new_tokens=tokens, settings=settings, seed=(seed + choice) % 2**32, reader=read
            )  # fmt: skip
            try:
                request.check(model.cfg, model.layout)
            except ValueError as error:
                raise BadRequest(str(error), "messages" if chat else "prompt") from None
            requests.append(request)
    return Call(
        chat=chat, requests=requests, prompt_tokens=sum(map(len, prompts)), stream=stream, usage=usage,
        logprobs=alternatives is not None,
    )  # fmt: skip


def _prompts(fields: Fields) -> list:
    """Takes one prompt or several, each a string or token ids."""
    prompt = fields.take("prompt")
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and all(type(t) is int for t in prompt)):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise fields.wrong("prompt", "must be a string, an array of token ids, or an array of either")
    if len(prompt) > MOST_CHOICES:
        raise fields.wrong("prompt", f"holds {len(prompt)} prompts; at most {MOST_CHOICES}")
    return prompt


def _completion_ids(fields: Fields, prompt: Any, model: Model) -> list[int]:
    if isinstance(prompt, list):
        if not all(type(token) is int for token in prompt):
            raise fields.wrong("prompt", "holds an array that is not of token ids only")
        return prompt
    text = fields.check_text("prompt", prompt)
    start = [] if model.cfg.bos_token_id is None else [model.cfg.bos_token_id]
    return start + model.tokenizer.encode(text, add_special_tokens=False).ids


def _stops(fields: Fields) -> tuple[str, ...]:
    """Takes no stop string, one or several."""
    stop = fields.take("stop", [])
    stops = tuple(fields.check_text("stop", text) for text in (stop if isinstance(stop, list) else [stop]))
    if len(stops) > MOST_STOPS or not all(1 <= len(text) <= LONGEST_STOP for text in stops):
        raise fields.wrong("stop", f"must be up to {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return stops


def _messages(fields: Fields) -> list[Message]:
    messages = fields.take("messages")
    if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
        raise fields.wrong("messages", "must be an array of one or more messages, objects with a role and content")
    return [_message(Fields(message, f"messages[{number}].")) for number, message in enumerate(messages)]


def _message(fields: Fields) -> Message:
    role, content = fields.text("role"), fields.take("content", "")
    if isinstance(content, list):
        parts = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text":
                raise fields.wrong(f"content[{number}]", "is not of type text; this server reads text only")
            parts.append(fields.check_text(f"content[{number}].text", part.get("text")))
        content = "".join(parts)
    content, reasoning = fields.check_text("content", content), fields.text("reasoning_content", "")
    for ignored in ("name", "refusal", "annotations"):
        fields.take(ignored)
    fields.done()
    try:
        return Message("system" if role == "developer" else str(role), content, reasoning or "")
    except ValueError as error:
        raise fields.wrong("role", f"does not fit: {error}") from None
