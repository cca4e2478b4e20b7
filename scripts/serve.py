"""Serves a checkpoint over HTTP, as OpenAI's API: completions, chat completions, streams, health and metrics.

Ctrl-C or SIGTERM stops it: no new call is taken, those under way are answered. Needs the extra `serve`.
"""

import argparse
import pathlib
import sys

import uvicorn

from v41jax import load_checkpoint, load_config
from v41jax.assets import BUILT_IN
from v41jax.engine import Engine
from v41jax.serving.app import Limits, make_app
from v41jax.serving.protocol import Model
from v41jax.serving.worker import Worker
from v41jax.slots import Layout
from v41jax.text import load_tokenizer


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=BUILT_IN, help="directory in the released layout")
    parser.add_argument("--name", help="of the model, in the API (default: the directory's)", default=argparse.SUPPRESS)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    parser.add_argument("--port", type=int, default=8000, help="port to listen on; 0 takes a free one")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode at once")
    parser.add_argument("--capacity", type=int, help="tokens of a sequence", default=argparse.SUPPRESS)
    parser.add_argument("--prefill-chunk", type=int, default=512, help="prompt tokens a call, a power of two")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding with the model's draft stages")
    parser.add_argument("--queue", type=int, default=256, help="requests that may wait; more are answered with 429")
    parser.add_argument("--first-token", type=float, default=60, help="seconds a caller waits for the first token")
    parser.add_argument("--answer", type=float, default=600, help="seconds a caller waits for the end of the answer")
    parser.add_argument("--grace", type=int, default=60, help="seconds that calls under way get when it stops")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations")
    return parser.parse_args(argv, argparse.Namespace(name=None, capacity=None))


def run(args):
    """Loads, compiles, listens."""
    cfg, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json; this API speaks text")
    capacity = args.capacity or min(8192, cfg.max_position_embeddings)
    layout = Layout(slots=args.slots, capacity=capacity, prefill_chunk=args.prefill_chunk, drafts=args.drafts)
    layout.check(cfg)
    _, params = load_checkpoint(args.checkpoint, dtype=args.dtype)
    engine = Engine(params, cfg, layout, most_waiting=args.queue)
    engine.programs.warm()
    model = Model(name=args.name or args.checkpoint.name, cfg=cfg, layout=layout, tokenizer=tokenizer)
    app = make_app(Worker(engine), model, Limits(first_token=args.first_token, answer=args.answer))
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=args.grace, access_log=False)


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    try:
        run(parse(argv))
    except ValueError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
