"""The model that engines serve in tests: state of every kind, a draft stage, and the tokens of a chat."""

import dataclasses
import functools

import jax
import sessions

from v41jax import chat, init_params
from v41jax.assets import BUILT_IN
from v41jax.text import load_tokenizer

SPECIAL = (chat.BEGIN, chat.END, chat.SYSTEM, chat.USER, chat.ASSISTANT, chat.THINK, chat.THOUGHT)
CFG = dataclasses.replace(sessions.DRAFTING, vocab_size=512 + len(SPECIAL))  # nothing rounded: `forward` is its oracle


@functools.cache
def params():
    return init_params(CFG, jax.random.key(4))


@functools.cache
def tokenizer():
    out = load_tokenizer(BUILT_IN)
    out.add_special_tokens(list(SPECIAL))
    return out
