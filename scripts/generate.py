"""Generates text from a checkpoint in the released layout; without one, from the tiny model that ships with v41jax.

Text goes to standard output, figures to standard error. Prompts given as token ids are answered in token ids.
"""

import argparse
import dataclasses
import functools
import pathlib
import sys
import time

from v41jax import generate, load_checkpoint, load_config, tree
from v41jax.assets import BUILT_IN
from v41jax.sampling import Sampling
from v41jax.text import RowIds, RowText, load_tokenizer
from v41jax.tickets import Request

DEFAULT_PROMPT = "def fibonacci(n):"


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=BUILT_IN, help="directory in the released layout")
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; several make a batch")
    parser.add_argument("--prompt-file", action="append", default=[], type=pathlib.Path, help="a file that is a prompt")
    parser.add_argument("--token-ids", action="append", default=[], help="a prompt as ids: 5,17,3")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="tokens to generate for each prompt")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the best token")
    parser.add_argument("--top-k", type=int, default=0, help="draw from the k best tokens; 0 from all")
    parser.add_argument("--top-p", type=float, default=1.0, help="draw from the best tokens that sum to this")
    parser.add_argument("--drafts", action="store_true", help="speculative decoding with the model's draft stages")
    parser.add_argument(
        "--least-chance", type=float, default=0.0, help="verify drafts while their confidence gives them this chance"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--stop", action="append", default=[], help="text that ends an answer; may be repeated")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default=argparse.SUPPRESS,
        help="of activations and unquantised weights (default: bfloat16; float32 for the built-in model)",
    )
    parser.add_argument("--prefill-chunk", type=int, default=512, help="prompt tokens a call, a power of two")
    parser.add_argument("--quantize-activations", action="store_true", help="W8A8 and W4A8 matmuls, as the reference")
    return parser.parse_args(argv, argparse.Namespace(dtype=None))


def read_text(path: pathlib.Path) -> str:
    """Reads a prompt file, with one sentence where that cannot be done."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file {path} cannot be read as UTF-8 text: {error}") from error


def read_prompts(args, cfg, tokenizer) -> list[list[int]]:
    """Collects the batch: texts, then files, then token ids."""
    texts = args.prompt + [read_text(path) for path in args.prompt_file]
    if not texts and not args.token_ids:
        texts = [DEFAULT_PROMPT]
    if texts and tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json; give prompts as --token-ids")
    start = [] if cfg.bos_token_id is None else [cfg.bos_token_id]
    prompts = [start + tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    for ids in args.token_ids:
        try:
            prompts.append([int(part) for part in ids.replace(",", " ").split()])
        except ValueError:
            raise ValueError(f"--token-ids {ids!r} is not a list of whole numbers such as 5,17,3") from None
    return prompts


def reader(args, cfg, tokenizer):
    """Picks what reads an answer: token ids where all prompts are, else text."""
    if tokenizer is None or (args.token_ids and not args.prompt and not args.prompt_file):
        if args.stop:
            raise ValueError("--stop ends answers in text; these prompts are token ids, answered in token ids")
        return functools.partial(RowIds, end_token=cfg.eos_token_id)
    RowText(tokenizer, tuple(args.stop))  # refuses bad stop strings now
    return functools.partial(RowText, tokenizer, tuple(args.stop), cfg.eos_token_id)


def run(args):
    """Loads, generates, prints."""
    cfg = load_config(args.checkpoint)
    if args.quantize_activations:
        cfg = dataclasses.replace(cfg, formats=dataclasses.replace(cfg.formats, activation="fp8_e8m0_32"))
    tokenizer = load_tokenizer(args.checkpoint)
    prompts = read_prompts(args, cfg, tokenizer)
    settings = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    read = reader(args, cfg, tokenizer)
    requests = [
        Request(prompt=ids, max_new_tokens=args.max_new_tokens, settings=settings, seed=args.seed + row, reader=read)
        for row, ids in enumerate(prompts)
    ]
    drafts = {"drafts": args.drafts, "least_chance": args.least_chance}
    layout = generate.layout_for(requests, cfg=cfg, prefill_chunk=args.prefill_chunk, **drafts)  # before loading

    started = time.perf_counter()
    dtype = args.dtype or ("float32" if args.checkpoint == BUILT_IN else "bfloat16")
    _, params = load_checkpoint(args.checkpoint, dtype=dtype)
    loaded, seconds = tree.nbytes(params), time.perf_counter() - started
    print(f"load     {loaded / 1e6:.1f} MB in {seconds:.2f} s ({loaded / 1e9 / seconds:.3f} GB/s)", file=sys.stderr)

    answers, stats = [""] * len(prompts), generate.Stats()
    for number, update in generate.stream(params, requests, cfg=cfg, layout=layout, stats=stats):
        new = "".join(token.text for token in update.tokens) + (update.rest or "")
        answers[number] += new
        if len(prompts) == 1:
            print(new, end="", flush=True)
    for number, answer in enumerate(answers):
        print("" if len(prompts) == 1 else f"=== prompt {number}\n{answer}")
    report(stats, len(prompts))


def report(stats: generate.Stats, batch: int):
    """Prints what the run cost."""
    prefill_rate = stats.prefill_tokens / stats.prefill_seconds
    print(f"compile  {stats.compile_seconds:.1f} s", file=sys.stderr)
    print(
        f"prefill  {stats.prefill_tokens} tokens in {stats.prefill_seconds:.3f} s ({prefill_rate:.1f} tokens/s)",
        file=sys.stderr,
    )
    if stats.decode_steps:
        tokens = stats.decode_tokens
        rate, step = tokens / stats.decode_seconds, stats.decode_seconds / stats.decode_steps
        print(
            f"decode   {tokens} tokens in {stats.decode_seconds:.3f} s ({rate:.1f} tokens/s, {1e3 * step:.2f} ms a"
            f" step, {tokens / stats.decode_steps / batch:.2f} tokens a step and row)",
            file=sys.stderr,
        )
    print(
        f"cache    {stats.cache_bytes} bytes for {batch} + 1 rows of {stats.capacity} tokens, of a row"
        f" {stats.window_bytes} are window rows; {stats.token_bytes} bytes a token",
        file=sys.stderr,
    )


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    try:
        run(parse(argv))
    except ValueError as error:
        print(f"generate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
