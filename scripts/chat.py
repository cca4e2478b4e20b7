"""Talks with a chat model in the terminal; answers appear as they are made.

One message a line; an empty line or the end of input ends the conversation, Ctrl-C stops an answer. Reasoning is shown
dimmed, and is not said again to the model.
"""

import argparse
import functools
import pathlib
import sys

from v41jax import chat, load_checkpoint, load_config
from v41jax.chat import AnswerText, Message, Style
from v41jax.engine import Engine
from v41jax.sampling import Sampling
from v41jax.slots import Layout
from v41jax.text import load_tokenizer
from v41jax.tickets import Request

DIM, PLAIN = "\033[2m", "\033[0m"


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True, help="directory in the released layout")
    parser.add_argument("--system", default="", help="a system prompt")
    parser.add_argument("--think", action="store_true", help="let the model reason before it answers")
    parser.add_argument("--effort", default="high", help="how thoroughly: low, high, xhigh, max, or 1 to 100")
    parser.add_argument("--max-new-tokens", type=int, default=1024, help="most tokens of an answer")
    parser.add_argument("--capacity", type=int, default=8192, help="most tokens of the conversation")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 takes the best token")
    parser.add_argument("--top-p", type=float, default=0.95, help="draw from the best tokens that sum to this")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding with the model's draft stages")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of activations")
    return parser.parse_args(argv)


def answer(engine: Engine, request: Request, show) -> tuple[str, str]:
    """Lets the engine answer and shows each piece; returns the reasoning and the content. Ctrl-C ends it early."""
    reasoning, content, ticket = "", "", engine.submit(request)
    while not engine.idle:
        try:
            updates = engine.turn()
        except KeyboardInterrupt:
            engine.cancel(ticket)
            continue
        for update in updates:
            for thought, said in [*(token.text for token in update.tokens), update.rest or ("", "")]:
                reasoning, content = reasoning + thought, content + said
                show(thought, said)
    return reasoning, content


def run(args):
    """Loads, then answers line by line."""
    cfg, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json; a conversation is text")
    effort = int(args.effort) if args.effort.isdecimal() else args.effort
    style = Style(thinking=args.think, effort=effort)
    read = functools.partial(AnswerText, tokenizer, style)
    read()  # refuses a tokenizer that is not a chat model's before minutes of loading
    settings = Sampling(temperature=args.temperature, top_p=args.top_p)
    layout = Layout(slots=1, capacity=args.capacity, drafts=args.drafts)
    layout.check(cfg)
    _, params = load_checkpoint(args.checkpoint, dtype=args.dtype)
    engine = Engine(params, cfg, layout)
    colour = sys.stdout.isatty()

    def show(thought: str, said: str):
        dimmed = f"{DIM}{thought}{PLAIN}" if thought and colour else thought
        print(dimmed + said, end="", flush=True)

    messages = [Message("system", args.system)] if args.system else []
    print("> ", end="", file=sys.stderr, flush=True)
    for line in iter(sys.stdin.readline, ""):
        if not line.strip():
            break
        messages.append(Message("user", line.rstrip("\n")))
        ids = chat.prompt_ids(messages, tokenizer, style)
        request = Request(
            prompt=ids, max_new_tokens=args.max_new_tokens, settings=settings, seed=args.seed, reader=read
        )  # fmt: skip
        reasoning, content = answer(engine, request, show)
        messages.append(Message("assistant", content, reasoning))
        print("\n> ", end="", file=sys.stderr, flush=True)
        print(flush=True)


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    try:
        run(parse(argv))
    except ValueError as error:
        print(f"chat: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
