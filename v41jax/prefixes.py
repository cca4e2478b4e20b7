"""Prompts that begin alike are read once: main KV and index keys of a prefix are kept, its windows made again.

A prefix is kept in blocks of one chunk of prefill, 890 bytes a token of the released model, and no window row. What
continues a prefix gets its entries back, and feeds as many of its last tokens again as the windows reach back through
all layers (prefill.md, exact replay); those tokens leave the entries alone. A block is known by all tokens up to its
end and by the mode of every chunk before it, so it is reused only where the same programs would have made it from the
same tokens: the answer is to the bit the one without reuse.
"""

import collections
import dataclasses
import hashlib
import json
import logging
import pathlib
import threading
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from v41jax import config
from v41jax.cache import Cache
from v41jax.config import Config
from v41jax.model import Params

log = logging.getLogger(__name__)

VERSION = 1  # of the files
SUFFIX = ".prefix"


# ---- on the device


def take(cache: Cache, first, *, chunk: int):
    """Copies the entries and keys of one row's tokens `first` .. `first + chunk - 1` out of every pool."""

    def part(ratio: int, planes):
        return jax.tree.map(
            lambda plane: jax.lax.dynamic_slice_in_dim(plane, first // ratio, chunk // ratio, axis=1), planes
        )

    return [part(ratio, (pool.entries, pool.keys)) for ratio, pool in _by_ratio(cache)]


def put(cache: Cache, block, first) -> Cache:
    """Writes what `take` took back, for the same tokens; donate the cache."""
    pools = []
    for (ratio, pool), (entries, keys) in zip(_by_ratio(cache), block, strict=True):

        def write(plane, rows, ratio=ratio):
            return jax.lax.dynamic_update_slice_in_dim(plane, rows, first // ratio, axis=1)

        pools.append(
            dataclasses.replace(
                pool,
                entries=jax.tree.map(write, pool.entries, entries),
                keys=jax.tree.map(write, pool.keys, keys),
            )
        )
    return dataclasses.replace(cache, pools=tuple(pools))


def resume(cache: Cache, start, kept, ngram_1N) -> Cache:
    """Makes an empty row that has its first `kept` tokens' entries ready to be fed from token `start` on."""
    pools = [
        dataclasses.replace(pool, kept_B=jnp.full_like(pool.kept_B, kept // ratio)) for ratio, pool in _by_ratio(cache)
    ]
    return dataclasses.replace(
        cache, pools=tuple(pools), length_B=jnp.full_like(cache.length_B, start), ngram_BN=ngram_1N
    )


def _by_ratio(cache: Cache):
    return [(pool.partial_kv.shape[1] + 1, pool) for pool in cache.pools]


@jax.jit
def _checksums(params: Params):
    """Two sums over the bytes of every array, weighted by place: u32 [arrays, 2]."""

    def checksum(array):
        data = jax.lax.bitcast_convert_type(array, jnp.uint8).reshape(-1).astype(jnp.uint32)
        place = jnp.arange(data.size, dtype=jnp.uint32)
        mixed = (data + 1) * (place * jnp.uint32(2654435761) ^ (place >> 15))
        return jnp.stack([jnp.sum(data * (2 * place + 1)), jnp.sum(mixed)])

    return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(params)])


def fingerprint(params: Params, cfg: Config, chunk: int) -> str:
    """Names a model, its weights, and what computes it: entries of another are of no use."""
    device = jax.devices()[0]
    leaves = [
        (jax.tree_util.keystr(path), leaf.shape, str(leaf.dtype)) for path, leaf in jax.tree.leaves_with_path(params)
    ]
    said = (VERSION, cfg, chunk, jax.__version__, device.platform, device.device_kind, leaves)
    return hashlib.sha256(repr(said).encode() + np.asarray(_checksums(params)).tobytes()).hexdigest()


# ---- on the host


def check(cfg: Config, chunk: int):
    """Raises ValueError where chunks do not end with whole groups of every layer."""
    multiple = config.group_multiple(cfg)
    if chunk % multiple:
        raise ValueError(
            f"prefill_chunk={chunk} is not a multiple of {multiple} tokens, whole groups of every layer;"
            " prefixes of this model cannot be kept"
        )


def chunk_names(prompt: Sequence[int], modes: Sequence[str], chunk: int) -> list[str]:
    """Names the whole chunks of a prompt, each by all tokens up to its end and the modes they are fed in."""
    name, names = hashlib.sha256(), []
    for number, mode in enumerate(modes[: len(prompt) // chunk]):
        tokens = np.asarray(prompt[number * chunk : (number + 1) * chunk], np.int32)
        name.update(mode.encode() + tokens.tobytes())
        names.append(name.copy().hexdigest())
    return names


def replay_start(length: int, kept: int, chunk: int, cfg: Config) -> int:
    """Where a prompt of `length` tokens, the first `kept` of them known, is to be fed from: a whole chunk; 0: no use.

    The encoder's output must be exact behind the prefix, for new entries, and on the decoder's tail. An encoder layer's
    window hides a wrong token from all that stand `sliding_window - 1` behind it, so that many tokens a layer before.
    """
    exact_from = min(kept, length - cfg.decoder_tail)
    start = exact_from - cfg.first_decoder_layer * (cfg.sliding_window - 1)
    return max(0, start // chunk * chunk)


class Prefixes:
    """Blocks of prefixes in host memory, those used last; any thread may use it."""

    def __init__(self, most_bytes: int):
        """Starts empty; holds at most `most_bytes`."""
        self._most_bytes, self.nbytes = most_bytes, 0
        self._blocks: collections.OrderedDict[str, bytes] = collections.OrderedDict()  # the one used longest ago first
        self._lock = threading.Lock()

    def __len__(self):
        return len(self._blocks)

    def __contains__(self, name: str) -> bool:
        return name in self._blocks

    def find(self, names: Sequence[str]) -> list[bytes]:
        """Returns the blocks of a prompt's chunks, from the first on to the first that is not there."""
        with self._lock:
            found = []
            for name in names:
                if name not in self._blocks:
                    break
                found.append(self._blocks[name])
            for name in reversed(names[: len(found)]):  # a block without those before it is of no use
                self._blocks.move_to_end(name)
            return found

    def add(self, name: str, block: bytes):
        """Keeps a block, and forgets those used longest ago where it would be too much."""
        with self._lock:
            self.nbytes -= len(self._blocks.pop(name, b""))
            self._blocks[name] = block
            self.nbytes += len(block)
            while self.nbytes > self._most_bytes:
                self.nbytes -= len(self._blocks.popitem(last=False)[1])

    def save(self, directory: str | pathlib.Path, fingerprint: str):
        """Writes every block to a file of its own, and removes files of blocks that are no longer kept."""
        directory = pathlib.Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        with self._lock:
            blocks = list(self._blocks.items())
        for age, (name, block) in enumerate(blocks):
            header = {"fingerprint": fingerprint, "name": name, "age": age, "sha256": hashlib.sha256(block).hexdigest()}
            part = directory / f"{name}.part"
            part.write_bytes(json.dumps(header).encode() + b"\n" + block)
            part.rename(directory / f"{name}{SUFFIX}")  # whole or not at all
        for path in directory.glob(f"*{SUFFIX}"):
            if path.stem not in self:
                path.unlink()

    def load(self, directory: str | pathlib.Path, fingerprint: str, block_bytes: int) -> int:
        """Reads blocks that `save` wrote; one that is damaged, or of another model, is left out, and the log says so.

        Returns how many were read.
        """
        read = []
        for path in sorted(pathlib.Path(directory).glob(f"*{SUFFIX}")):
            head, _, block = path.read_bytes().partition(b"\n")
            wrong = _what_is_wrong(path.stem, head, block, fingerprint, block_bytes)
            if wrong:
                log.warning("%s is not used: %s", path, wrong)
            else:
                read.append((json.loads(head)["age"], path.stem, block))
        for _, name, block in sorted(read):
            self.add(name, block)
        return len(read)


def _what_is_wrong(name: str, head: bytes, block: bytes, fingerprint: str, block_bytes: int) -> str | None:
    try:
        header = json.loads(head)
        said = header["name"], header["fingerprint"], header["sha256"]
    except (ValueError, KeyError, TypeError):
        return "its header is damaged"
    if said[1] != fingerprint:
        return "it is of another model, or of other weights, programs or devices"
    if said[0] != name or len(block) != block_bytes or said[2] != hashlib.sha256(block).hexdigest():
        return "it is damaged"
    return None
