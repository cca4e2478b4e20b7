"""Converts a checkpoint between the released safetensors layout and Orbax, or checks a released one.

    python scripts/convert_checkpoint.py SOURCE TARGET
    python scripts/convert_checkpoint.py --check DIR

What SOURCE is, is seen from what it holds; TARGET gets the other layout. A check reads headers only.
"""

import argparse
import pathlib
import sys

from v41jax import checkpoint, model


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 for a bad checkpoint or target, 2 for bad usage."""
    parser = argparse.ArgumentParser(
        description="Convert a checkpoint between the released safetensors layout and Orbax, or check a released one.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="directory to read, either layout")
    parser.add_argument("target", nargs="?", metavar="TARGET", help="directory to write; must be empty or not exist")
    parser.add_argument(
        "--dtype",
        choices=("keep", "bfloat16", "float32"),
        default="keep",
        help="dtype of float weights; keep loses nothing; FP8 and FP4 stay as they are whichever it is",
    )
    parser.add_argument("--check", metavar="DIR", help="report on a released-layout directory instead of converting")
    args = parser.parse_args(argv)
    paths = [path for path in (args.source, args.target) if path is not None]
    if len(paths) != (2 if args.check is None else 0):
        parser.error("give SOURCE and TARGET, or --check DIR alone")
    try:
        return convert(*paths, dtype=args.dtype) if args.check is None else check(args.check)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def convert(source: str, target: str, *, dtype: str) -> int:
    """Writes `source` to `target` in the other layout."""
    orbax = checkpoint.is_orbax(source)
    if orbax:
        cfg, params = checkpoint.restore_orbax(source, dtype=None if dtype == "keep" else dtype)
    else:
        dtype = checkpoint.check_checkpoint(source).float_dtype if dtype == "keep" else dtype
        cfg, params = checkpoint.load_checkpoint(source, dtype=dtype)
    tokenizer = pathlib.Path(source) / checkpoint.TOKENIZER
    save = checkpoint.save_checkpoint if orbax else checkpoint.save_orbax
    save(target, params, cfg=cfg, tokenizer=tokenizer if tokenizer.is_file() else None)
    print(f"{target}: {'released layout' if orbax else 'Orbax'}, from {source}")
    return 0


def check(directory: str) -> int:
    """Prints what a released-layout directory holds and all that is wrong with it."""
    report = checkpoint.check_checkpoint(directory)
    print(f"{'storage':<12}{'tensors':>10}{'bytes':>20}")
    counts = [tensor.dtype for tensor in report.tensors.values()]
    for dtype, nbytes in report.bytes_by_type.items():
        print(f"{dtype:<12}{counts.count(dtype):>10,}{nbytes:>20,}")
    print(f"{'all':<12}{len(counts):>10,}{sum(report.bytes_by_type.values()):>20,}")
    if report.cfg is not None:
        for kind, count in model.parameter_count(report.cfg).items():
            print(f"{kind:<12}{count:>30,} parameters")
    if report.skipped:
        print(f"{report.skipped} tensors of the vision path are not read")
    for problem in report.problems:
        print(f"problem: {problem}")
    print(f"{len(report.problems)} problems in {directory}" if report.problems else f"OK: {directory}")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
