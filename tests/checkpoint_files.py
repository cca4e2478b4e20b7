"""The files of a checkpoint, read, written and edited by code that is written out a second time."""

import contextlib
import json
import math

from sessions import CHECKPOINTS

from v41jax import safetensors

PLAIN, PACKED = CHECKPOINTS["tiny-f32"], CHECKPOINTS["tiny-fp8fp4"]
INDEX = "model.safetensors.index.json"


def read_shard(file):
    """Returns {name: (dtype, shape, bytes)}."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__", None)
    data = raw[8 + length :]
    return {n: (e["dtype"], e["shape"], data[slice(*e["data_offsets"])]) for n, e in header.items()}


def write_shard(file, tensors):
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def read_all(path):
    out = {}
    for shard in set(json.loads((path / INDEX).read_text())["weight_map"].values()):
        out |= read_shard(path / shard)
    return out


@contextlib.contextmanager
def edited_json(file):
    content = json.loads(file.read_text())
    yield content
    file.write_text(json.dumps(content))


@contextlib.contextmanager
def edited(path, name):
    """Yields the tensors of the shard that holds `name`, and writes them back with an index to match."""
    with edited_json(path / INDEX) as index:
        shard = index["weight_map"][name]
        before = read_shard(path / shard)
        tensors = dict(before)
        yield tensors
        write_shard(path / shard, tensors)
        for gone in before.keys() - tensors.keys():
            del index["weight_map"][gone]
        index["weight_map"] |= dict.fromkeys(tensors.keys() - before.keys(), shard)


def retyped(path, name, dtype, shape=None):
    """Gives a tensor another dtype and shape, and zeros of the size they take."""
    with edited(path, name) as tensors:
        shape = tensors[name][1] if shape is None else shape
        tensors[name] = (dtype, shape, bytes(math.prod(shape) * safetensors.BITS[dtype] // 8))


def shard_of(path, name):
    return path / json.loads((path / INDEX).read_text())["weight_map"][name]
