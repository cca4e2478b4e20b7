"""Fine-tunes a model with quantised caches and weights: indexer warm-up, sparse training, QAT, drafts.

    python scripts/finetune_qat.py                                          # a micro model, a few steps
    python scripts/finetune_qat.py --settings scripts/tiny.toml --model scripts/tiny --output runs/tiny
    python scripts/finetune_qat.py --model DIR --text FILE... --output runs/mine

Where OUTPUT holds an unfinished run of the same settings, that run is continued.
"""

import argparse
import dataclasses
import pathlib
import sys
import typing

from v41jax.training.finetune import finetune, load_start
from v41jax.training.settings import Settings, from_dict, read_settings

MICRO = pathlib.Path(__file__).parent / "micro"


def parse(argv):
    """Reads the command line; settings that are not given are absent, so that the file's or the defaults hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model",
        type=pathlib.Path,
        default=MICRO,
        help="directory in the released layout, or one with config.json and tokenizer.json alone for random weights"
        " (default: a micro model of 4 layers)",
    )
    output = pathlib.Path("runs/finetune")
    parser.add_argument("--output", type=pathlib.Path, default=output, help=f"directory of the run (default: {output})")
    parser.add_argument("--settings", type=pathlib.Path, help="TOML file of settings and stages (default: none)")
    parser.add_argument("--no-tensorboard", action="store_true", help="write no TensorBoard files")
    group = parser.add_argument_group("settings that override the file's")
    kinds = typing.get_type_hints(Settings)
    for field in dataclasses.fields(Settings):
        if field.name != "stages":
            name = f"--{field.name.replace('_', '-')}"
            many = isinstance(field.default, tuple)
            kind, choices = kinds[field.name], None
            text = f"{field.metadata['help']} (default: {'none' if many else field.default})"
            if kind is bool:
                group.add_argument(name, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
                continue
            if typing.get_origin(kind) is typing.Literal:
                kind, choices = str, typing.get_args(kind)
            group.add_argument(
                name,
                type=str if many else kind,
                choices=choices,
                nargs="*" if many else None,
                default=argparse.SUPPRESS,
                help=text,
            )
    group.add_argument("--steps", type=int, nargs="+", metavar="N", help="steps of each stage (default: the file's)")
    return parser.parse_args(argv)


def collect(args) -> Settings:
    """Puts the file and the command line together."""
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Settings) if hasattr(args, f.name)}
    settings = from_dict(given) if args.settings is None else read_settings(args.settings, **given)
    if args.steps is not None:
        if len(args.steps) != len(settings.stages):
            raise ValueError(f"--steps gives {len(args.steps)} numbers for {len(settings.stages)} stages")
        stages = [dataclasses.replace(s, steps=n) for s, n in zip(settings.stages, args.steps, strict=True)]
        settings = dataclasses.replace(settings, stages=tuple(stages))
    return settings


def main(argv=None) -> int:
    """Runs the script; a mistake of the caller is one sentence and exit status 2."""
    args = parse(argv)
    try:
        settings = collect(args)
        start = load_start(args.model, seed=settings.seed, lora_rank=settings.lora_rank)
        target = finetune(start, settings, output=args.output, tensorboard=not args.no_tensorboard)
    except ValueError as error:
        print(f"finetune_qat: {error}", file=sys.stderr)
        return 2
    print(f"{target}: the model; metrics.jsonl and plots are in {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
