"""Text to token arrays: files, ready arrays, or the source of the Python that runs this, which needs no download."""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from tokenizers import Tokenizer
from tqdm import tqdm

from v41jax.config import Config

HELD_OUT_OF = 32  # one file in so many is held out
INSTALLED = {"site-packages", "dist-packages", "__pycache__"}  # not the standard library's own
TEXTS_AT_ONCE = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents in token ids, one behind another."""

    tokens_N: np.ndarray  # integer ids of all documents
    start_K: np.ndarray  # i64 [documents + 1]; document k is tokens start_K[k] .. start_K[k + 1] - 1

    def __len__(self) -> int:
        """Documents."""
        return len(self.start_K) - 1


def read_text(path: str | pathlib.Path) -> str:
    """Reads a UTF-8 file; raises one ValueError that names it where that cannot be done, or it is empty."""
    try:
        text = pathlib.Path(path).read_bytes().decode()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8: byte {error.object[error.start]:#04x} at {error.start}") from error
    if not text:
        raise ValueError(f"{path} is empty; leave it out")
    return text


def standard_library(*, held_out: bool) -> list[str]:
    """Reads the Python source files of the standard library, tests included where they are installed, sorted by path.

    A file's own hash decides whether it is held out, so the halves are disjoint even where files repeat. Files in other
    encodings than UTF-8, a handful that test encodings, and empty ones are no part of it.
    """
    root, texts = pathlib.Path(sysconfig.get_paths()["stdlib"]), []
    for path in sorted(root.rglob("*.py")):
        if INSTALLED.intersection(path.relative_to(root).parts):
            continue
        content = path.read_bytes()
        number = int.from_bytes(hashlib.sha256(content).digest()[:8], "big")
        if content and _is_utf8(content) and (number % HELD_OUT_OF == 0) == held_out:
            texts.append(content.decode())
    return texts


def _is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def tokenize(texts: Sequence[str], tokenizer: Tokenizer, *, cfg: Config) -> Corpus:
    """Makes each text a document: the config's begin token, the text, its end token."""
    begin = [] if cfg.bos_token_id is None else [cfg.bos_token_id]
    end = [] if cfg.eos_token_id is None else [cfg.eos_token_id]
    documents = []
    with tqdm(total=len(texts), desc="tokenize", unit="text", disable=None, leave=False) as bar:
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[first : first + TEXTS_AT_ONCE])
            for encoding in tokenizer.encode_batch_fast(some, add_special_tokens=False):
                documents.append(np.array(begin + encoding.ids + end, np.int32))
            bar.update(len(some))
    return join(documents, cfg=cfg, source="the text")


def join(documents: Iterable[np.ndarray], *, cfg: Config, source: str) -> Corpus:
    """Puts documents behind one another; raises ValueError for none, and for ids outside the vocabulary."""
    parts = list(documents)
    if not parts or not all(map(len, parts)):
        raise ValueError(f"{source} holds no document, or an empty one; give at least one token for each")
    tokens_N = np.concatenate(parts)
    wrong = tokens_N[(tokens_N < 0) | (tokens_N >= cfg.vocab_size)]
    if wrong.size:
        raise ValueError(f"{source} holds token id {wrong[0]}; the model's are 0 to {cfg.vocab_size - 1}")
    return Corpus(tokens_N=tokens_N, start_K=np.cumsum([0, *map(len, parts)]))


def read_array(path: str | pathlib.Path, *, cfg: Config) -> Corpus:
    """Reads a .npy of token ids [N]; a document starts at each begin token of the config, and at the front.

    Raises ValueError that names the file where it is no such array or holds ids the model does not have.
    """
    try:
        tokens_N = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path} is not a .npy array: {error}") from error
    if tokens_N.ndim != 1 or not np.issubdtype(tokens_N.dtype, np.integer) or not tokens_N.size:
        raise ValueError(f"{path} is {tokens_N.dtype} {list(tokens_N.shape)}; it must be integer token ids [N], N > 0")
    starts = np.zeros(0, np.int64) if cfg.bos_token_id is None else np.flatnonzero(tokens_N == cfg.bos_token_id)
    return join(np.split(tokens_N, starts[starts > 0]), cfg=cfg, source=str(path))


def load(paths: Sequence[str | pathlib.Path], tokenizer: Tokenizer | None, *, cfg: Config) -> Corpus:
    """Reads text files (a document each) and .npy arrays; raises ValueError that names the path at fault."""
    arrays = [read_array(path, cfg=cfg) for path in paths if pathlib.Path(path).suffix == ".npy"]
    texts = [read_text(path) for path in paths if pathlib.Path(path).suffix != ".npy"]
    if texts and tokenizer is None:
        raise ValueError("text files need a tokenizer.json beside the model's config.json; give .npy token arrays")
    parts = [tokenize(texts, tokenizer, cfg=cfg), *arrays] if texts and tokenizer is not None else arrays
    return join((document for part in parts for document in documents(part)), cfg=cfg, source="the data")


def documents(corpus: Corpus) -> Iterator[np.ndarray]:
    """Yields each document's ids."""
    for first, stop in zip(corpus.start_K[:-1], corpus.start_K[1:], strict=True):
        yield corpus.tokens_N[first:stop]


def built_in(tokenizer: Tokenizer, *, held_out: bool, cfg: Config, cache: pathlib.Path) -> Corpus:
    """Tokenizes the standard library once; later calls read `cache`/NAME.npy, named after texts and tokenizer."""
    if cfg.bos_token_id is None:
        raise ValueError("bos_token_id is null; the built-in corpus keeps documents apart by it, so name data files")
    texts = standard_library(held_out=held_out)
    key = hashlib.sha256(tokenizer.to_str().encode())
    for text in texts:
        key.update(hashlib.sha256(text.encode()).digest())
    path = cache / f"{'held-out' if held_out else 'train'}-{key.hexdigest()[:16]}.npy"
    if not path.exists():
        corpus = tokenize(texts, tokenizer, cfg=cfg)
        cache.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".partial-{os.getpid()}.npy")
        np.save(partial, corpus.tokens_N)
        os.replace(partial, path)
    return read_array(path, cfg=cfg)
