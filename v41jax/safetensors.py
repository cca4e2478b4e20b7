"""The safetensors file format: headers, memory-mapped reading, streaming writing.

A file is a 64-bit little-endian length, a JSON header of that length, and the tensors' bytes without gaps. The
safetensors library is not used for two reasons: its NumPy reader has no F8 types (it raises AttributeError), and its
NumPy writer wants a whole shard in memory. Here FP8, FP4 and E8M0 stay bytes (uint8), and neither direction holds more
than one piece of one tensor.
"""

import collections
import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

BITS = {  # every type of the format, so that a wrong one is named rather than called unknown
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
STORED = {  # what a tensor of each type this model uses is in memory
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I8": np.dtype(np.uint8),
    "F8_E4M3": np.dtype(np.uint8),
    "F8_E8M0": np.dtype(np.uint8),
}
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_HEADER = 100_000_000  # bytes, the format's own limit
PIECE = 1 << 24  # bytes of a file mapped at a time


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Where one tensor stands: a header's entry."""

    file: pathlib.Path
    dtype: str  # a key of BITS, or what else the header says
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int

    def __str__(self) -> str:
        """Says its type and shape, as messages do."""
        return f"{self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor to write."""

    name: str
    dtype: str  # a key of STORED
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[np.ndarray]]  # its values in order, called when its turn comes

    @property
    def nbytes(self) -> int:
        """Bytes it takes in the file."""
        return math.prod(self.shape) * STORED[self.dtype].itemsize


def read_header(path: str | pathlib.Path) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Reads what a file says it holds, and compares that with its size; no tensor is read.

    Returns:
      The tensors by name; the names whose entries are damaged, None if the header is no header; and all that is
      wrong, a sentence each.
    """
    path = pathlib.Path(path)
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(LONGEST_HEADER, size - 8):
            return {}, None, [f"{path.name}: garbage or cut short, a header of {length} bytes in a file of {size}"]
        text = file.read(length)
    try:
        header = json.loads(text)
    except ValueError as error:  # JSON or UTF-8
        return {}, None, [f"{path.name}: its header is not JSON: {error}"]
    if not isinstance(header, dict):
        return {}, None, [f"{path.name}: its header is a JSON {type(header).__name__}, not an object"]
    tensors, damaged, problems = {}, set(), []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if wrong := _entry_problem(entry):
            problems.append(f"{path.name}: {name}: {wrong}")
            damaged.add(name)
            continue
        start, stop = entry["data_offsets"]
        tensors[name] = Tensor(path, entry["dtype"], tuple(entry["shape"]), 8 + length + start, stop - start)
    return tensors, damaged, problems or _layout_problems(path, tensors, first=8 + length, size=size)


def _entry_problem(entry: Any) -> str | None:
    """Says what is wrong with one entry of a header, by itself."""

    def counts(values: Any) -> list[int] | None:
        return values if isinstance(values, list) and all(type(v) is int and v >= 0 for v in values) else None

    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return f"its header entry has no dtype: {entry!r}"
    shape, offsets = counts(entry.get("shape")), counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        return f"its header entry has no shape and data_offsets of whole numbers: {entry!r}"
    nbytes, bits = offsets[1] - offsets[0], BITS.get(entry["dtype"])
    if nbytes < 0 or (bits is not None and nbytes * 8 != math.prod(shape) * bits):
        return f"{entry['dtype']} {shape} does not fill bytes {offsets[0]} to {offsets[1]}"
    return None


def _layout_problems(path: pathlib.Path, tensors: dict[str, Tensor], *, first: int, size: int) -> list[str]:
    """Finds gaps, overlaps, and an end that is not the end of the file."""
    end = first
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != end:
            fault = (
                "overlaps the tensor before it" if tensor.offset < end else f"follows a gap of {tensor.offset - end}"
            )
            return [f"{path.name}: {name} starts at byte {tensor.offset} and {fault}; {end} was due"]
        end += tensor.nbytes
    if end > size:
        return [f"{path.name}: truncated, its header promises {end} bytes and it has {size}"]
    return [f"{path.name}: {size - end} bytes follow the last tensor"] if end < size else []


def read_directory(path: pathlib.Path) -> tuple[dict[str, Tensor], set[str] | None, list[str]]:
    """Reads the headers of all shards that the directory's index names, or of its one file.

    Returns the tensors found; the names already reported as damaged or absent, None if nobody knows them; the problems.
    """
    if not (path / INDEX).is_file():
        if not (path / SINGLE).is_file():
            return {}, None, [f"{path} holds neither {INDEX} nor {SINGLE}"]
        return read_header(path / SINGLE)
    named = collections.defaultdict(set)
    try:
        shard_of = json.loads((path / INDEX).read_text())["weight_map"]
        for name, shard in shard_of.items():
            named[shard].add(name)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, None, [f"{INDEX} is not JSON with a weight_map of names to files ({error!r})"]
    found, unread, problems = {}, set(), []
    for shard, names in sorted(named.items(), key=lambda item: str(item[0])):
        inside = isinstance(shard, str) and pathlib.Path(shard).name == shard  # no path that leads elsewhere
        if not inside or not (path / shard).is_file():
            problems.append(f"{shard}: this shard is missing; {INDEX} places {len(names)} tensors in it")
            unread |= names
            continue
        tensors, damaged, broken = read_header(path / shard)
        problems += broken
        absent = names - tensors.keys()
        unread |= absent
        for name in sorted(absent - damaged) if damaged is not None else ():
            problems.append(f"{name}: {INDEX} places it in {shard}, which lacks it")
        for name in sorted(tensors.keys() - names):
            problems.append(f"{name}: {shard} holds it, but {INDEX} says {shard_of.get(name, 'nothing of it')}")
        found |= {name: tensor for name, tensor in tensors.items() if name in names or name not in found}
    return found, unread, problems


def read_into(out: np.ndarray, tensor: Tensor) -> None:
    """Copies a tensor into `out`, cast to its dtype.

    The file is mapped a piece at a time and every mapping is dropped, so neither the values nor the file's pages add
    more than PIECE bytes to the process.
    """
    flat, stored = out.reshape(-1), STORED[tensor.dtype]
    assert np.shares_memory(flat[:1], out), "out must be contiguous"
    step = PIECE // stored.itemsize
    for start in range(0, flat.size, step):
        part = flat[start : start + step]
        offset = tensor.offset + start * stored.itemsize
        part[...] = np.memmap(tensor.file, stored, mode="r", offset=offset, shape=part.shape)


def write_file(path: str | pathlib.Path, sources: Sequence[Source], *, wrote: Callable[[int], Any] = lambda n: None):
    """Writes one file, tensor by tensor; wider types come first, so that all are aligned.

    Args:
      path: made, or overwritten.
      sources: what to write; `blocks` of each is called once.
      wrote: told the bytes of each block when it is written, for a progress bar.
    """
    sources = sorted(sources, key=lambda source: -STORED[source.dtype].itemsize)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # other loaders refuse a file without it
    end = 0
    for source in sources:
        offsets = [end, end := end + source.nbytes]
        header[source.name] = {"dtype": source.dtype, "shape": list(source.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with pathlib.Path(path).open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for source in sources:
            begin = file.tell()
            for block in source.blocks():
                assert block.dtype == STORED[source.dtype], (source.name, block.dtype)
                file.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
                wrote(block.nbytes)
            assert file.tell() - begin == source.nbytes, source.name


def write_directory(
    path: pathlib.Path,
    sources: Sequence[Source],
    *,
    shard_bytes: int,
    wrote: Callable[[int], Any] = lambda n: None,
):
    """Writes tensors as numbered shards and the index that names them.

    Args:
      path: an existing directory.
      sources: what to write, in order; a shard is full when the next tensor would pass `shard_bytes`.
      shard_bytes: bytes of tensors in a file; a larger tensor has a file of its own.
      wrote: as in `write_file`.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}; a shard holds at least one byte, say 5_000_000_000")
    shards, size = [[]], 0
    for source in sources:
        if size and size + source.nbytes > shard_bytes:
            shards, size = [*shards, []], 0
        shards[-1].append(source)
        size += source.nbytes
    shard_of = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(path / file, shard, wrote=wrote)
        shard_of |= {source.name: file for source in shard}
    index = {"metadata": {"total_size": sum(s.nbytes for s in sources)}, "weight_map": dict(sorted(shard_of.items()))}
    (path / INDEX).write_text(json.dumps(index, indent=2) + "\n")
