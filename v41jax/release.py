"""What a released-layout directory should hold, and what is wrong with one, from headers alone (section 10)."""

import collections
import dataclasses
import pathlib
import re
from collections.abc import Iterator

from v41jax import config_json, model, quant, safetensors, tree
from v41jax.config import Config
from v41jax.safetensors import Tensor

TOKENIZER = "tokenizer.json"
VISION = re.compile(r"(vision|aligner)\.|image_(start|end|newline)(\.|$)")  # of the vision path, unused by text

PathLike = str | pathlib.Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """One tensor of the released layout, and the part of the parameters it fills."""

    plane: str  # dotted path of the array: "layers.0.attn.wq_a.codes", "norm"
    expert: int | None  # which index of the array's first dimension; None: the whole array
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]  # storage types it may have
    rule: str  # why it is wanted so

    def __str__(self) -> str:
        """Says type and shape, as messages do."""
        return f"{' or '.join(self.dtypes)} {list(self.shape)}"


def release_layout(cfg: Config) -> dict[str, Wanted]:
    """Lists every tensor of a released checkpoint of this config by name, scales behind their weights."""
    out = {}
    for path, spec in tree.walk(model.specs(cfg)):
        if not spec.released:
            continue
        front, _, last = path.rpartition(".")
        for e in range(spec.shape[0]) if spec.per_expert else (None,):
            stem = path if e is None else f"{front}.{e}.{last}"
            shape = spec.shape if e is None else spec.shape[1:]
            if spec.format is None:
                dtypes = ("F32",) if spec.dtype == "float32" else ("BF16", "F32")
                rule = "kept in float32" if spec.dtype == "float32" else "a plain float weight"
                out[stem + spec.suffix] = Wanted(plane=path, expert=e, shape=shape, dtypes=dtypes, rule=rule)
                continue
            f = quant.FORMATS[spec.format]
            group = f"{f.rows}x{f.group} block" if f.rows > 1 else f"row and {f.group} columns"
            codes, scales = f.code_shape(shape), f.scale_shape(shape)
            out[stem + spec.suffix] = Wanted(
                plane=f"{path}.codes",
                expert=e,
                shape=codes,
                dtypes=("I8",) if f.channels_per_byte == 2 else ("F8_E4M3",),
                rule=f"stored as {spec.format}",
            )
            rule = f"one scale per {group} of {stem}{spec.suffix}, stored as {spec.format}"
            rule += "; draft stages are quantised like the backbone" if path.startswith("mtp.") else ""
            out[f"{stem}.scale"] = Wanted(
                plane=f"{path}.scales", expert=e, shape=scales, dtypes=("F8_E8M0",), rule=rule
            )
    return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a released-layout directory holds, and all that is wrong with it."""

    path: pathlib.Path
    cfg: Config | None  # None: config.json could not be read
    tensors: dict[str, Tensor] = dataclasses.field(repr=False)  # of the text model
    skipped: int  # tensors of the vision path
    float_dtype: str  # the narrowest dtype that holds the float weights exactly
    problems: tuple[str, ...]  # a sentence each; empty: `load_checkpoint` can read it

    @property
    def bytes_by_type(self) -> dict[str, int]:
        """Bytes of the text model's tensors by storage type."""
        out = collections.Counter()
        for tensor in self.tensors.values():
            out[tensor.dtype] += tensor.nbytes
        return dict(sorted(out.items()))


def check_checkpoint(path: PathLike, cfg: Config | None = None) -> CheckReport:
    """Compares a released-layout directory with its config, reading headers only.

    Args:
      path: the directory.
      cfg: what it should hold; None reads its config.json.
    Returns:
      A report that lists every problem, so one run shows all that is wrong. Values are not looked at.
    Raises:
      ValueError for a path that is no directory; a bad checkpoint raises nothing.
    """
    path = pathlib.Path(path)
    if not path.is_dir():
        raise ValueError(f"{path} is not a directory; give the one that holds config.json and the .safetensors files")
    problems, wanted = [], {}
    try:
        cfg = config_json.load_config(path) if cfg is None else cfg
        wanted = release_layout(cfg)
    except ValueError as error:
        problems.append(str(error))
    if cfg is not None and cfg.engram_layer_ids and not (path / TOKENIZER).is_file():
        problems.append(f"{TOKENIZER} is missing; Engram's token map is derived from it")
    found, unread, broken = safetensors.read_directory(path)
    problems += broken
    if cfg is not None and wanted:
        problems += _likely_causes(cfg, wanted, found)
        problems += _mismatches(wanted, found, unread)
    vision = {name for name in found if VISION.match(name)}
    wide = any(len(want.dtypes) > 1 and name in found and found[name].dtype == "F32" for name, want in wanted.items())
    return CheckReport(
        path=path,
        cfg=cfg,
        tensors={name: tensor for name, tensor in found.items() if name not in vision},
        skipped=len(vision),
        float_dtype="float32" if wide else "bfloat16",
        problems=tuple(problems),
    )


def _likely_causes(cfg: Config, wanted: dict[str, Wanted], found: dict[str, Tensor]) -> Iterator[str]:
    """Guesses what a whole class of mismatches comes from."""
    both = [(want, found[name]) for name, want in wanted.items() if name in found]
    # Engram tables are FP8 in every checkpoint, so they tell nothing.
    packed = [tensor for want, tensor in both if want.plane.endswith(".codes") and ".engram.embed." not in want.plane]
    if packed and all(tensor.dtype in ("BF16", "F16", "F32") for tensor in packed):
        yield (
            f"likely cause: config.json has a quantization_config, but the {len(packed)} weights it makes FP8 or FP4 "
            f"are plain {packed[0].dtype}; drop that key, or take the quantised files"
        )
    floats = [tensor for want, tensor in both if len(want.dtypes) > 1 and tensor.dtype in ("F8_E4M3", "I8")]
    if floats and not cfg.quantized:
        yield f"likely cause: config.json has no quantization_config, but {len(floats)} weights are FP8 or FP4"
    if cfg.quantized and found and not any(name.endswith(".scale") for name in found):
        yield "likely cause: no tensor ends in .scale, so the scales were left out or renamed"
    if any(name.endswith(".weight_scale_inv") for name in found):
        yield "likely cause: scales are named weight_scale_inv, so this is the 128x128 FP8 layout of DeepSeek-V3"
    if any(name.startswith("model.") for name in found):
        yield "likely cause: names start with 'model.', so this is a Transformers export, not the released layout"


def _mismatches(wanted: dict[str, Wanted], found: dict[str, Tensor], unread: set[str] | None) -> Iterator[str]:
    """Compares every tensor; those of unreadable shards may be anything."""
    for name, want in wanted.items():
        tensor = found.get(name)
        if tensor is None:
            if unread is not None and name not in unread:
                yield f"{name}: missing, expected {want}, {want.rule}"
        elif tensor.dtype not in want.dtypes or tensor.shape != want.shape:
            note = ""
            if tensor.dtype.startswith(("F8_E4M3FN", "F8_E5M2")) and "F8_E4M3" in want.dtypes:
                note = f"; {tensor.dtype} codes stand for other values, so they cannot be read as F8_E4M3"
            elif tensor.dtype != "F8_E8M0" and "F8_E8M0" in want.dtypes:
                note = "; E8M0 is the exponent as a byte, 120 for 2^-7, which no other type can stand for"
            yield f"{name}: expected {want}, found {tensor} ({want.rule}{note})"
    for name, tensor in found.items():
        if name not in wanted and not VISION.match(name):
            yield f"{name}: unexpected, found {tensor}; a model of this config has no such tensor"
