"""Trains a byte-level BPE tokenizer on UTF-8 text files; without any, on the source of the Python standard library."""

import argparse
import pathlib
import sys

from v41jax.engram import compressed_ids
from v41jax.training import corpus
from v41jax.training.tokenizer import train_tokenizer


def main(argv: list[str] | None = None) -> int:
    """Runs the command line; a mistake of the caller is one sentence and exit status 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("output", type=pathlib.Path, metavar="OUTPUT", help="the tokenizer.json to write")
    parser.add_argument("--text", nargs="+", default=[], type=pathlib.Path, help="UTF-8 text files")
    parser.add_argument("--vocab-size", type=int, default=4096, help="token ids, special tokens and bytes among them")
    args = parser.parse_args(argv)
    try:
        texts = [corpus.read_text(path) for path in args.text] or corpus.standard_library(held_out=False)
        tokenizer = train_tokenizer(texts, vocab_size=args.vocab_size)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        tokenizer.save(str(args.output), pretty=False)
    except (ValueError, OSError) as error:
        print(f"train_tokenizer: {error}", file=sys.stderr)
        return 2
    size, compressed = tokenizer.get_vocab_size(), max(compressed_ids(tokenizer)) + 1
    print(f"{args.output}: vocab_size {size}, engram_compressed_vocab_size {compressed}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
