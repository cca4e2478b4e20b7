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
    parser.add_argument("--memory", type=int, help="bytes on the device (default: all)", default=argparse.SUPPRESS)
    parser.add_argument("--prefix-bytes", type=int, default=0, help="host memory for prefixes of prompts; 0 keeps none")
    parser.add_argument("--prefixes", type=pathlib.Path, help="directory that keeps them between runs")
    parser.add_argument("--queue", type=int, default=256, help="requests that may wait; more are answered with 429")
    parser.add_argument("--first-token", type=float, default=60, help="seconds a caller waits for the first token")
    parser.add_argument("--answer", type=float, default=600, help="seconds a caller waits for the end of the answer")
    parser.add_argument("--grace", type=int, default=60, help="seconds that calls under way get when it stops")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations")
    return parser.parse_args(argv, argparse.Namespace(name=None, capacity=None, memory=None))


def run(args):
    """Loads, compiles, listens."""
    cfg, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json; this API speaks text")
    capacity = args.capacity or min(8192, cfg.max_position_embeddings)
    if args.prefixes and not args.prefix_bytes:
        raise ValueError("--prefixes keeps what is in --prefix-bytes of memory; give that too, such as 10000000000")
    layout = Layout(
        slots=args.slots, capacity=capacity, prefill_chunk=args.prefill_chunk, drafts=args.drafts,
        prefix_bytes=args.prefix_bytes,
    )  # fmt: skip
    layout.check(cfg)
    _, params = load_checkpoint(args.checkpoint, dtype=args.dtype)
    engine = Engine(params, cfg, layout, most_waiting=args.queue, memory_bytes=args.memory)
    engine.warm()
    if args.prefixes:
        engine.load_prefixes(args.prefixes)
    model = Model(name=args.name or args.checkpoint.name, cfg=cfg, layout=layout, tokenizer=tokenizer)
    app = make_app(Worker(engine), model, Limits(first_token=args.first_token, answer=args.answer))
    uvicorn.run(app, host=args.host, port=args.port, timeout_graceful_shutdown=args.grace, access_log=False)
    if args.prefixes:
        engine.save_prefixes(args.prefixes)


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
