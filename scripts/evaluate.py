"""Evaluates checkpoints in the released layout, side by side, on held-out text.

    python scripts/evaluate.py --checkpoint runs/tiny/stages/* runs/tiny/model --output runs/tiny/evaluation

The loss with quantised and with plain caches, what share of the attention mass of the heaviest entries the indexers
select, passkeys with and without the candidate pool, and accepted drafts. A table goes to standard output; with
--output, evaluation.json and evaluation.png are written as well.
"""

import argparse
import json
import pathlib
import sys

from tqdm import tqdm

from v41jax import Config, load_checkpoint, load_config
from v41jax.assets import BUILT_IN
from v41jax.text import load_tokenizer
from v41jax.training import corpus, evaluation, qat
from v41jax.training.passkey import PasskeyTask
from v41jax.training.progress import import_extra

RECALL_WANTED = 0.95  # of the attention mass, after the indexer's warm-up


class Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of the description, and says defaults."""


def parse(argv):
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Formatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, nargs="+", default=[BUILT_IN], help="directories")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32", help="of activations")
    parser.add_argument("--text", nargs="*", default=[], help="held-out files; none: of the standard library")
    parser.add_argument("--loss-length", type=int, default=1024, help="most tokens of a held-out piece")
    parser.add_argument("--pieces", type=int, default=64, help="held-out pieces")
    parser.add_argument("--recall-length", type=int, default=4096, help="tokens of the rows recall is measured on")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences a call, and rows recall is measured on")
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[1024, 4096, 8192, 16384], help="of passkey documents"
    )
    parser.add_argument("--passkeys", type=int, default=32, help="documents of each length, depths spread evenly")
    parser.add_argument("--prompts", type=int, default=32, help="held-out prompts whose answers are drafted")
    parser.add_argument("--prompt-length", type=int, default=256, help="tokens of each")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens of their answers")
    parser.add_argument("--seed", type=int, default=0, help="of the passkeys")
    parser.add_argument("--output", type=pathlib.Path, help="directory for evaluation.json and evaluation.png")
    return parser.parse_args(argv)


def check(args, cfg: Config, path: pathlib.Path) -> None:
    """Raises ValueError for a request that cannot be met, before any work."""
    least = {"loss_length": 2, "pieces": 1, "recall_length": 2, "batch_size": 1, "passkeys": 1, "prompts": 1}
    least |= {"prompt_length": 1, "new_tokens": cfg.dspark_block_size + 1}
    for name, value in least.items():
        if getattr(args, name) < value:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)}; it must be {value} or more")
    longest = max([args.loss_length, args.recall_length, args.prompt_length + args.new_tokens, *args.lengths])
    if longest > cfg.max_position_embeddings:
        raise ValueError(f"length {longest} exceeds max_position_embeddings={cfg.max_position_embeddings} of {path}")


def evaluate(args) -> dict:
    """Measures everything; returns {checkpoint: the result of `evaluate_one`}."""
    models = {str(path): load_config(path) for path in args.checkpoint}
    for path, cfg in models.items():
        check(args, cfg, pathlib.Path(path))
    texts = corpus.standard_library(held_out=True) if not args.text else []
    with tqdm(total=len(models), desc="evaluate", unit="model", disable=None, leave=False) as bar:
        results = {}
        for path, cfg in models.items():
            results[path] = evaluate_one(args, pathlib.Path(path), cfg, texts)
            bar.update()
    return results


def evaluate_one(args, path: pathlib.Path, cfg: Config, texts: list[str]) -> dict:
    """Measures one checkpoint: {"loss": {caches: nats}, "recall": [...], "passkey": {pool: {length: share}}, ...}."""
    tokenizer = load_tokenizer(path)
    if tokenizer is None:
        raise ValueError(f"{path} has no tokenizer.json; text and passkeys need one")
    if args.text:
        held_out = corpus.load(args.text, tokenizer, cfg=cfg)
    else:
        held_out = corpus.tokenize(texts, tokenizer, cfg=cfg)
    _, params = load_checkpoint(path, dtype=args.dtype)

    result = {"loss": {}, "passkey": {}}
    for name, config in {"quantised": cfg, "plain": qat.without_quantized_caches(cfg)}.items():
        loss = evaluation.held_out_loss(
            params, held_out, cfg=config, length=args.loss_length, pieces=args.pieces, batch_size=args.batch_size
        )
        result["loss"][name], result["loss_tokens"] = loss.nats_per_token, loss.tokens
    result["recall"] = evaluation.indexer_recall(
        params, held_out, cfg=cfg, length=args.recall_length, rows=args.batch_size
    )
    pools = {"on": cfg, "off": evaluation.without_pool(cfg)} if cfg.candidate_source_layer_id is not None else {"": cfg}
    if args.lengths:
        capacity = max(args.lengths)
        task = PasskeyTask(held_out, tokenizer, cfg=cfg, row_length=capacity, rows=1, seed=args.seed)
        for pool, config in pools.items():
            result["passkey"][pool] = {
                length: evaluation.passkey_accuracy(
                    params,
                    task,
                    cfg=config,
                    length=length,
                    count=args.passkeys,
                    batch_size=args.batch_size,
                    capacity=capacity,
                )
                for length in args.lengths
            }
    if cfg.num_nextn_predict_layers:
        result["drafts"] = evaluation.draft_acceptance(
            params,
            held_out,
            cfg=cfg,
            length=args.prompt_length,
            new_tokens=args.new_tokens,
            prompts=args.prompts,
            batch_size=args.batch_size,
        )._asdict()
    return result


def report(results: dict) -> None:
    """Prints the table."""
    for path, result in results.items():
        print(f"== {path}")
        for name, loss in result["loss"].items():
            print(f"held-out loss, {name} caches: {loss:.4f} nats a token ({result['loss_tokens']} tokens)")
        for number, share in enumerate(result["recall"]):
            print(f"recall of index source {number}: {100 * share:.1f} % of the attention mass of the heaviest entries")
        for pool, shares in result["passkey"].items():
            for length, share in shares.items():
                print(f"passkeys at {length:>7} tokens, pool {pool}: {100 * share:.1f} % right")
        if "drafts" in result:
            shares = ", ".join(f"{100 * share:.1f}" for share in result["drafts"]["share_n"])
            print(f"drafts accepted up to each place of a block: {shares} %")
            print(f"tokens a call, with drafts: {result['drafts']['tokens_a_call']:.2f}")


def write(results: dict, output: pathlib.Path) -> None:
    """Writes evaluation.json and evaluation.png."""
    output.mkdir(parents=True, exist_ok=True)
    (output / "evaluation.json").write_text(json.dumps(results, indent=2) + "\n")
    figure = import_extra("matplotlib.figure").Figure(figsize=(12, 8), layout="constrained")
    (recall, loss), (passkey, accepted) = figure.subplots(2, 2)
    names = [pathlib.Path(path).name for path in results]
    every = list(zip(names, results.values(), strict=True))
    for name, result in every:
        recall.plot([100 * share for share in result["recall"]], marker="o", label=name)
        for pool, shares in result["passkey"].items():
            style = "--" if pool == "off" else "-"
            passkey.plot(list(shares), [100 * s for s in shares.values()], style, marker="o", label=f"{name} {pool}")
        if "drafts" in result:
            shares = result["drafts"]["share_n"]
            accepted.plot(range(1, len(shares) + 1), [100 * share for share in shares], marker="o", label=name)
    recall.axhline(100 * RECALL_WANTED, color="grey", linestyle=":")
    recall.set(xlabel="index source", ylabel="attention mass selected, %")
    recall.xaxis.get_major_locator().set_params(integer=True)
    for caches in ("quantised", "plain"):
        loss.plot(names, [result["loss"][caches] for _, result in every], marker="o", label=f"{caches} caches")
    loss.set(ylabel="held-out loss, nats a token")
    passkey.set(xlabel="tokens", ylabel="passkeys right, % (pool on, off)", ylim=(-5, 105))
    passkey.set_xscale("log", base=2)
    accepted.set(xlabel="place in the block", ylabel="drafts accepted so far, %", ylim=(-5, 105))
    for axes in (recall, loss, passkey, accepted):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(output / "evaluation.png", dpi=120)


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    args = parse(argv)
    try:
        results = evaluate(args)
        report(results)
        if args.output is not None:
            write(results, args.output)
    except ValueError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
