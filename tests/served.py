"""The model that engines serve in tests: state of every kind, a draft stage, and the tokens of a chat."""

import contextlib
import dataclasses
import functools
import threading
import time

import jax
import sessions
import uvicorn

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


@contextlib.contextmanager
def serving(app):
    """Runs an ASGI application on a free port of the loopback; yields its uvicorn server, whose `url` is set."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", access_log=False))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    server.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield server
    server.should_exit = True
    thread.join()
