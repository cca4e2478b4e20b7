"""Checkpoints: the released safetensors layout and Orbax, to and from the parameters (architecture section 10).

`load_checkpoint` first checks the directory (`release.py`), then reads one leaf at a time; FP8 and FP4 weights stay
packed. Every save writes beside its target and takes the name last, so an interrupted one never looks complete.
The file format is in `safetensors.py`, which also says why the library of that name does not serve.
"""

import collections
import contextlib
import json
import logging
import os
import pathlib
import shutil
import uuid
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from v41jax import config_json, engram, model, safetensors, tree
from v41jax.config import Config
from v41jax.quant import Packed
from v41jax.release import TOKENIZER, PathLike, check_checkpoint, release_layout
from v41jax.safetensors import Source, Tensor

log = logging.getLogger(__name__)

ORBAX = "params"  # the folder of an Orbax checkpoint that Orbax itself writes
LISTED = 50  # problems an error lists; it counts the rest
FLOATS = {"bfloat16": "BF16", "float32": "F32"}  # dtype of float weights -> storage type
BLOCK = 1 << 26  # bytes copied from a device at a time


def _planes(params: Any) -> dict[str, Any]:
    """Flattens parameters to arrays by dotted path; the two of a Packed end in "codes" and "scales"."""

    def name(key) -> str:
        return str(next(getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)))

    return {".".join(map(name, path)): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def _assemble(specs: tree.Specs, planes: dict[str, Any]) -> model.Params:
    """Undoes `_planes`."""
    leaves = {}
    for path, spec in tree.walk(specs):
        packed = spec.format is not None
        leaves[path] = (
            Packed(planes[f"{path}.codes"], planes[f"{path}.scales"], spec.format) if packed else planes[path]
        )
    return tree.unflatten(specs, leaves)


def _float_dtype(dtype: Any) -> np.dtype:
    """Reads the dtype of float weights."""
    with contextlib.suppress(TypeError):
        if jnp.dtype(dtype).name in FLOATS:
            return jnp.dtype(dtype)
    raise ValueError(f"dtype={dtype!r} is not a dtype of float weights; it must be one of {', '.join(FLOATS)}")


def _raise_all(what: str, problems: list[str] | tuple[str, ...]) -> None:
    """Raises one ValueError that lists the problems, if any."""
    if problems:
        more = [f"... and {len(problems) - LISTED} more"] if len(problems) > LISTED else []
        count = f"{len(problems)} problem{'s' * (len(problems) > 1)}"
        raise ValueError(f"{what}; {count}:" + "".join(f"\n  {line}" for line in [*problems[:LISTED], *more]))


# ---- released layout


def load_checkpoint(path: PathLike, *, dtype: Any, shardings: Any = None) -> tuple[Config, model.Params]:
    """Loads a released-layout directory; FP8 and FP4 weights stay packed.

    Files are mapped, not read whole, and one array is filled at a time (all experts of a projection are one array).
    On a CPU the arrays take over the memory they were read into, so the peak is the arrays plus a few MiB; elsewhere
    the host holds one array at a time.

    Args:
      path: directory with config.json, tokenizer.json (if the model has Engram layers), and either
        model.safetensors.index.json and its shards or model.safetensors.
      dtype: float32 or bfloat16, for float weights whose dtype the architecture does not fix.
      shardings: a tree like the parameters with jax Shardings in place of arrays; None: the default device.
    Returns:
      The config and the parameters.
    Raises:
      ValueError, before a tensor is read, that lists all that is wrong: missing, unexpected, mis-shaped and mis-typed
      tensors, damaged and missing files.
    """
    dtype, path = _float_dtype(dtype), pathlib.Path(path)
    report = check_checkpoint(path)
    _raise_all(f"{path} is not a checkpoint this model can load", report.problems)
    cfg = report.cfg
    assert cfg is not None
    if report.skipped:
        log.info("%s: skipped %d tensors of the vision path; this is the text model", path, report.skipped)
    specs = model.specs(cfg)
    targets = _planes(tree.abstract(specs, dtype))
    where = collections.defaultdict(lambda: None) if shardings is None else _planes(shardings)
    planes = {}
    if cfg.engram_layer_ids:  # first: a wrong tokenizer should show before an hour of reading
        planes["token_map"] = jax.device_put(engram.token_map(path / TOKENIZER, cfg), where["token_map"])

    parts = collections.defaultdict(list)
    for name, want in release_layout(cfg).items():
        parts[want.plane].append((report.tensors[name], want.expert))
    for pieces in parts.values():
        pieces.sort(key=lambda piece: (piece[0].file, piece[0].offset))
    in_file_order = sorted(parts, key=lambda plane: (parts[plane][0][0].file, parts[plane][0][0].offset))
    total = sum(tensor.nbytes for tensor in report.tensors.values())
    with _progress(total, "load") as bar:
        for plane in in_file_order:
            array = jax.device_put(_read(parts[plane], targets[plane], bar), where[plane])
            planes[plane] = jax.block_until_ready(array)  # else copies to a device would pile up on the host
    return cfg, _assemble(specs, planes)


def _read(pieces: list[tuple[Tensor, int | None]], target: jax.ShapeDtypeStruct, bar: tqdm) -> np.ndarray:
    """Fills one array from the tensors that make it up."""
    out = _aligned_empty(target.shape, target.dtype)
    for tensor, expert in pieces:
        safetensors.read_into(out if expert is None else out[expert], tensor)
        bar.update(tensor.nbytes)
    return out


def _aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Makes an array that JAX on CPU can take over without a copy: it starts at a multiple of 64 bytes."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _progress(total: int, verb: str) -> tqdm:
    """Makes a bar that counts bytes on a terminal, and nothing elsewhere."""
    return tqdm(total=total, desc=verb, unit="B", unit_scale=True, disable=None)


def save_checkpoint(
    path: PathLike,
    params: model.Params,
    *,
    cfg: Config,
    tokenizer: PathLike | None = None,
    shard_bytes: int = 5 * 10**9,
) -> None:
    """Writes parameters as a released-layout directory, which `load_checkpoint` and other tools read.

    What was loaded with the dtype it was stored in is written back byte for byte. Float weights keep their dtype,
    tensors of the vision path are not written.

    Args:
      path: a directory that does not exist or is empty; it appears when all is on disk, or not at all.
      params: as `cfg` describes them: packed where it stores FP8 or FP4. Sharded arrays are fetched piece by piece.
      cfg: written as config.json.
      tokenizer: a tokenizer.json to copy; loading a model with Engram layers needs one.
      shard_bytes: bytes of tensors in one file; a tensor that is larger has a file of its own.
    Raises:
      ValueError for a target that holds anything, for parameters that do not fit `cfg`.
    """
    planes = _checked(_planes(params), cfg)
    if cfg.engram_layer_ids and tokenizer is None:
        log.warning("%s: saved without a %s, which loading a model with Engram layers needs", path, TOKENIZER)
    sources = []
    for name, want in release_layout(cfg).items():
        array = planes[want.plane]
        dtype = want.dtypes[0] if array.dtype == np.uint8 else FLOATS[array.dtype.name]
        sources.append(Source(name, dtype, want.shape, lambda a=array, e=want.expert: _blocks(a, e)))
    total = sum(source.nbytes for source in sources)
    with _new_directory(path, tokenizer, cfg) as directory, _progress(total, "save") as bar:
        safetensors.write_directory(directory, sources, shard_bytes=shard_bytes, wrote=bar.update)


def _checked(planes: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """Returns the arrays, or raises with all in which they do not fit the config."""
    specs, problems = model.specs(cfg), []
    wanted, free = _planes(tree.abstract(specs, "bfloat16")), _free_floats(specs)
    for plane, want in wanted.items():
        if plane not in planes:
            problems.append(f"{plane}: missing, expected {want.dtype} {list(want.shape)}")
            continue
        array = planes[plane]
        fits = array.dtype == want.dtype or (plane in free and array.dtype.name in FLOATS)
        if not fits or array.shape != want.shape:
            expected = f"{' or '.join(FLOATS) if plane in free else want.dtype} {list(want.shape)}"
            problems.append(f"{plane}: expected {expected}, found {array.dtype} {list(array.shape)}")
        elif not getattr(array, "is_fully_addressable", True):
            problems.append(f"{plane}: parts of it are on other hosts; gather it first")
    problems += [f"{plane}: unexpected" for plane in planes.keys() - wanted.keys()]
    _raise_all("the parameters are not those of this config", problems)
    return planes


def _free_floats(specs: tree.Specs) -> set[str]:
    """Paths of the float weights whose dtype is the caller's choice."""
    return {path for path, spec in tree.walk(specs) if spec.format is None and spec.dtype is None}


def _blocks(array: Any, expert: int | None) -> Iterator[np.ndarray]:
    """Yields an array, or one expert of it, in blocks of rows."""
    first, last = (0, array.shape[0]) if expert is None else (expert, expert + 1)
    step = max(1, BLOCK * array.shape[0] // max(1, array.nbytes))
    for start in range(first, last, step):
        yield _fetch(array, start, min(start + step, last))


def _fetch(array: Any, start: int, stop: int) -> np.ndarray:
    """Copies rows to the host, shard by shard.

    Nothing is gathered on devices, and, as each piece is a new array, no host copy stays cached in `array`.
    """
    if isinstance(array, np.ndarray):
        return array[start:stop]
    out = np.empty((stop - start, *array.shape[1:]), array.dtype)
    for shard in array.addressable_shards:
        begin, end, _ = shard.index[0].indices(array.shape[0])
        low, high = max(start, begin), min(stop, end)
        if shard.replica_id == 0 and low < high:
            if shard.device.platform == "cpu":
                rows = np.asarray(shard.data)[low - begin : high - begin]
            else:
                rows = np.asarray(jax.lax.dynamic_slice_in_dim(shard.data, low - begin, high - low))
            out[(slice(low - start, high - start), *shard.index[1:])] = rows
    return out


@contextlib.contextmanager
def _new_directory(path: PathLike, tokenizer: PathLike | None, cfg: Config) -> Iterator[pathlib.Path]:
    """Yields a directory that becomes `path`, with config.json and tokenizer.json, once all is on disk."""
    path = pathlib.Path(path).absolute()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ValueError(f"{path} exists and is not an empty directory; nothing was written")
    if tokenizer is not None and not pathlib.Path(tokenizer).is_file():
        raise ValueError(f"tokenizer={str(tokenizer)!r} is not a file; nothing was written")
    partial = path.with_name(f".{path.name}.partial-{uuid.uuid4().hex[:8]}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if tokenizer is not None:
            shutil.copyfile(tokenizer, partial / TOKENIZER)
        (partial / "config.json").write_text(json.dumps(config_json.to_json(cfg), indent=2) + "\n")
        for file in [*partial.rglob("*"), partial]:
            _sync(file)
        os.replace(partial, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _sync(path: pathlib.Path) -> None:
    """Waits until a file or directory is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---- Orbax


def is_orbax(path: PathLike) -> bool:
    """Tells a directory that `save_orbax` wrote."""
    return (pathlib.Path(path) / ORBAX / "_METADATA").is_file()


def save_orbax(path: PathLike, params: model.Params, *, cfg: Config, tokenizer: PathLike | None = None) -> None:
    """Writes parameters with Orbax, sharded as they are, and config.json beside them.

    Args and Raises: as `save_checkpoint`. The token map is among the parameters, so `tokenizer` is for generation and
    for converting back only.
    """
    import orbax.checkpoint as ocp  # slow to import, and not needed to run a released checkpoint

    planes = _checked(_planes(params), cfg)
    with _new_directory(path, tokenizer, cfg) as directory, ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
        writer.save(directory / ORBAX, args=ocp.args.PyTreeSave(planes))


def restore_orbax(path: PathLike, *, dtype: Any = None, shardings: Any = None) -> tuple[Config, model.Params]:
    """Restores what `save_orbax` wrote, on any number of devices: shardings at the time of saving play no part.

    Args:
      path: the directory.
      dtype: as in `load_checkpoint`; None keeps each float weight as saved.
      shardings: as in `load_checkpoint`.
    Returns:
      The config and the parameters.
    Raises:
      ValueError for a directory that is no Orbax checkpoint, or lists all in which it does not fit its config.json.
    """
    import orbax.checkpoint as ocp

    path = pathlib.Path(path).absolute()
    if not is_orbax(path):
        raise ValueError(f"{path} is not an Orbax checkpoint; save_orbax writes config.json and {ORBAX}/ in it")
    float_dtype = None if dtype is None else _float_dtype(dtype)
    cfg = config_json.load_config(path)
    free = _free_floats(model.specs(cfg))
    default = jax.device_put(np.uint8(0)).sharding
    where = collections.defaultdict(lambda: default) if shardings is None else _planes(shardings)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        saved = _planes(reader.metadata(path / ORBAX).item_metadata.tree)
        saved = {plane: jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype)) for plane, array in saved.items()}
        target = {}
        for plane, array in _checked(saved, cfg).items():
            kind = float_dtype if float_dtype is not None and plane in free else array.dtype
            target[plane] = jax.ShapeDtypeStruct(array.shape, kind, sharding=where[plane])
        restore = ocp.checkpoint_utils.construct_restore_args(target)
        planes = reader.restore(path / ORBAX, args=ocp.args.PyTreeRestore(target, restore_args=restore))
    return cfg, _assemble(model.specs(cfg), planes)
