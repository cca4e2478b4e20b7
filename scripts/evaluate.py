"""Evaluates a checkpoint: held-out loss with quantised and plain caches, passkeys with and without the candidate pool.

A table goes to standard output; with --output, evaluation.json and passkeys.png are written as well.
"""

import argparse
import json
import pathlib
import sys

from tqdm import tqdm

from v41jax import load_checkpoint, load_config
from v41jax.assets import BUILT_IN
from v41jax.text import load_tokenizer
from v41jax.training import corpus, evaluation
from v41jax.training.passkey import PasskeyTask
from v41jax.training.progress import import_extra


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, default=BUILT_IN, help="directory in the released layout")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of activations")
    parser.add_argument("--text", nargs="*", default=[], help="held-out files; none: of the standard library")
    parser.add_argument("--loss-length", type=int, default=1024, help="most tokens of a held-out piece")
    parser.add_argument("--pieces", type=int, default=64, help="held-out pieces")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a call")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[1024, 4096, 8192, 16384], help="of passkey documents"
    )
    parser.add_argument("--passkeys", type=int, default=32, help="documents of each length, depths spread evenly")
    parser.add_argument("--seed", type=int, default=0, help="of the passkeys")
    parser.add_argument("--output", type=pathlib.Path, help="directory for evaluation.json and passkeys.png")
    return parser.parse_args(argv)


def evaluate(args) -> dict:
    """Measures everything; returns {"loss": {caches: nats}, "passkey": {pool: {length: share}}, ...}."""
    cfg, tokenizer = load_config(args.checkpoint), load_tokenizer(args.checkpoint)
    if tokenizer is None:
        raise ValueError(f"{args.checkpoint} has no tokenizer.json; text and passkeys need one")
    longest = max([args.loss_length, *args.lengths])
    if longest > cfg.max_position_embeddings:
        raise ValueError(f"length {longest} exceeds max_position_embeddings={cfg.max_position_embeddings}")
    for name in ("loss_length", "pieces", "batch_size", "passkeys"):
        least = 2 if name == "loss_length" else 1
        if getattr(args, name) < least:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}; it must be {least} or more")
    if args.text:
        held_out = corpus.load(args.text, tokenizer, cfg=cfg)
    else:
        held_out = corpus.tokenize(corpus.standard_library(held_out=True), tokenizer, cfg=cfg)
    task = PasskeyTask(
        held_out, tokenizer, cfg=cfg, row_length=max([*args.lengths, args.loss_length]), rows=1, seed=args.seed
    )
    _, params = load_checkpoint(args.checkpoint, dtype=args.dtype)

    caches = {"quantised": cfg, "plain": evaluation.without_quantized_caches(cfg)}
    pools = {"on": cfg, "off": evaluation.without_pool(cfg)} if cfg.candidate_source_layer_id is not None else {"": cfg}
    result = {"checkpoint": str(args.checkpoint), "loss": {}, "passkey": {pool: {} for pool in pools}}
    with tqdm(
        total=1 + len(caches) + len(pools) * len(args.lengths), desc="evaluate", disable=None, leave=False
    ) as bar:
        for name, config in caches.items():
            loss = evaluation.held_out_loss(
                params, held_out, cfg=config, length=args.loss_length, pieces=args.pieces, batch_size=args.batch_size
            )
            result["loss"][name], result["loss_tokens"] = loss.nats_per_token, loss.tokens
            bar.update()
        for pool, config in pools.items():
            for length in args.lengths:
                result["passkey"][pool][length] = evaluation.passkey_accuracy(
                    params, task, cfg=config, length=length, count=args.passkeys, batch_size=args.batch_size
                )
                bar.update()
        result["recall"] = evaluation.indexer_recall(
            params, held_out, cfg=cfg, length=args.loss_length, rows=args.batch_size
        )
        bar.update()
    return result


def report(result: dict) -> None:
    """Prints the table."""
    for name, loss in result["loss"].items():
        print(f"held-out loss, {name} caches: {loss:.4f} nats a token ({result['loss_tokens']} tokens)")
    for number, share in enumerate(result["recall"]):
        print(f"recall of index source {number}: {100 * share:.1f} % of the attention mass of the heaviest entries")
    for pool, shares in result["passkey"].items():
        for length, share in shares.items():
            print(f"passkeys at {length:>7} tokens, pool {pool}: {100 * share:.1f} % right")


def write(result: dict, output: pathlib.Path) -> None:
    """Writes evaluation.json and passkeys.png."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(result, indent=2) + "\n")
    figure = import_extra("matplotlib.figure").Figure(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    for pool, shares in result["passkey"].items():
        axes.plot(list(shares), [100 * share for share in shares.values()], marker="o", label=f"pool {pool}")
    axes.set(xlabel="tokens", ylabel="passkeys right, %", ylim=(-5, 105))
    axes.set_xscale("log", base=2)
    axes.legend()
    figure.savefig(output / "passkeys.png", dpi=120)


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    args = parse(argv)
    try:
        result = evaluate(args)
        report(result)
        if args.output is not None:
            write(result, args.output)
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
