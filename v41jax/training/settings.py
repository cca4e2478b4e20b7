"""What a training run does, read from a TOML file: data, optimizer, and stages one after another (training.md)."""

import dataclasses
import pathlib
import tomllib
import types
import typing
from typing import Any, Literal

Kind = Literal["dense", "warmup", "sparse", "drafts"]  # what a stage trains


def _require(ok: bool, message: str):
    if not ok:
        raise ValueError(f"settings: {message}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage: what trains, and the learning rate over its steps."""

    name: str = "sparse"
    steps: int = 10
    # dense: all of the backbone but its indexers, attention over all visible entries; warmup: indexers alone, taught by
    # such attention; sparse: all of the backbone, attention over what indexers select; drafts: draft stages alone
    kind: Kind = "sparse"
    qat: bool = False  # rounds weights to FP8 and FP4 in the forward pass
    caches: bool = True  # rounds caches, index keys and index queries there, as inference stores them
    learning_rate: float = 1e-3  # at its highest
    warmup_steps: int = 0  # linear from 0
    decay_steps: int = 0  # cosine to a tenth, after a constant part
    final_steps: int = 0  # constant at a tenth
    row_length: int = 0  # in place of the run's; 0: as the run has it
    batch_size: int = 0  # likewise

    def __post_init__(self):
        for name in ("row_length", "batch_size"):
            value = getattr(self, name)
            _require(value >= 0, f"stage {self.name!r}: {name}={value}; it must be 0, for the run's, or more")
        for name in ("steps", "warmup_steps", "decay_steps", "final_steps"):
            value = getattr(self, name)
            _require(value >= (name == "steps"), f"stage {self.name!r}: {name}={value} is too small")
        parts = self.warmup_steps + self.decay_steps + self.final_steps
        _require(parts <= self.steps, f"stage {self.name!r}: a schedule of {parts} steps exceeds steps={self.steps}")
        _require(self.learning_rate > 0, f"stage {self.name!r}: learning_rate={self.learning_rate} must be over 0")
        _require(bool(self.name), "a stage has an empty name")


DEFAULT_STAGES = (
    Stage(name="warmup", kind="warmup"),
    Stage(name="sparse"),
    Stage(name="qat", qat=True),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """A whole run. Field comments are the command line's help."""

    seed: int = dataclasses.field(default=0, metadata={"help": "of initial values, the order of data, and passkeys"})
    text: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"help": "UTF-8 text files or .npy token arrays; none: the Python standard library"}
    )
    held_out: tuple[str, ...] = dataclasses.field(
        default=(), metadata={"help": "like text, for evaluation; none: the held-out part of the standard library"}
    )
    row_length: int = dataclasses.field(default=128, metadata={"help": "tokens in a row of a batch"})
    batch_size: int = dataclasses.field(default=2, metadata={"help": "rows in a batch, all hosts together"})
    micro_batches: int = dataclasses.field(default=1, metadata={"help": "parts a batch is split into, one at a time"})
    passkey_share: float = dataclasses.field(default=0.2, metadata={"help": "share of rows that are passkey retrieval"})
    dtype: Literal["float32", "bfloat16"] = dataclasses.field(
        default="float32", metadata={"help": "of activations; master weights and optimizer state are float32"}
    )
    lora_rank: int = dataclasses.field(
        default=0, metadata={"help": "of adapters beside frozen packed weights (`lora.py`); 0 trains the weights"}
    )
    weight_decay: float = dataclasses.field(default=0.1, metadata={"help": "of matrices and embeddings"})
    kl_weight: float = dataclasses.field(default=1.0, metadata={"help": "weight of the indexer's KL loss"})
    balance_weight: float = dataclasses.field(default=1e-4, metadata={"help": "weight of the expert balance loss"})
    bias_step: float = dataclasses.field(default=1e-3, metadata={"help": "step of the experts' correction bias"})
    teacher: Literal["own", "group"] = dataclasses.field(
        default="group", metadata={"help": "who teaches an indexer: its own layer, or all that use its selection"}
    )
    clip: float = dataclasses.field(default=1.0, metadata={"help": "largest norm of all gradients together"})
    save_every: int = dataclasses.field(default=10, metadata={"help": "steps between checkpoints"})
    keep: int = dataclasses.field(default=2, metadata={"help": "checkpoints kept"})
    export_stages: bool = dataclasses.field(
        default=False, metadata={"help": "also write the model every stage but the last ends in, OUTPUT/stages/NAME"}
    )
    stages: tuple[Stage, ...] = DEFAULT_STAGES

    def __post_init__(self):
        for name, least in {"row_length": 2, "batch_size": 1, "micro_batches": 1, "save_every": 1, "keep": 1}.items():
            value = getattr(self, name)
            _require(value >= least, f"{name}={value}; it must be {least} or more")
        _require(0 <= self.passkey_share <= 1, f"passkey_share={self.passkey_share}; it must be 0 to 1")
        for name in ("lora_rank", "weight_decay", "kl_weight", "balance_weight", "bias_step"):
            value = getattr(self, name)
            _require(value >= 0, f"{name}={value}; it must be 0 or more")
        _require(self.clip > 0, f"clip={self.clip}; it must be over 0")
        names = [stage.name for stage in self.stages]
        _require(bool(names), "there is no stage; give at least one [[stages]]")
        _require(len(names) == len(set(names)), f"stages are named {names}; names must differ")
        for stage in self.stages:
            length, size = self.rows(stage)
            _require(length >= 2, f"stage {stage.name!r}: row_length={length}; it must be 2 or more")
            _require(
                size % self.micro_batches == 0,
                f"batch_size={size} is not a multiple of micro_batches={self.micro_batches}",
            )

    def rows(self, stage: Stage) -> tuple[int, int]:
        """The row length and batch size of a stage."""
        return stage.row_length or self.row_length, stage.batch_size or self.batch_size

    @property
    def steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)


def read_settings(path: str | pathlib.Path, **overrides: Any) -> Settings:
    """Reads a TOML file whose keys are the fields of Settings, `[[stages]]` those of Stage.

    Args:
      path: the file.
      overrides: values of Settings that replace the file's.
    Raises:
      ValueError, one sentence that names the key: a file that is no TOML, an unknown key, an illegal value.
    """
    try:
        values = tomllib.loads(pathlib.Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"settings file {path} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"settings file {path} is not TOML: {error}") from error
    return from_dict(values | overrides)


def from_dict(values: dict[str, Any]) -> Settings:
    """Builds Settings from plain values, as TOML and JSON have them."""
    values = dict(values)
    stages = values.pop("stages", None)
    if stages is not None:
        _require(isinstance(stages, list), "stages is no list of tables; write each as [[stages]]")
        values["stages"] = tuple(_build(Stage, stage, "a stage") for stage in stages)
    return _build(Settings, values, "settings")


def to_dict(settings: Settings) -> dict[str, Any]:
    """The plain values that `from_dict` reads back."""
    values = dataclasses.asdict(settings)
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def _build(kind: type, values: dict[str, Any], where: str) -> Any:
    fields = {field.name: typing.get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}
    _require(isinstance(values, dict), f"{where} is no table of keys")
    for name, value in values.items():
        _require(name in fields, f"{where} has no key {name!r}; keys are {', '.join(fields)}")
        if name != "stages":
            values = {**values, name: _typed(value, fields[name], name)}
    return kind(**values)


def _typed(value: Any, kind: Any, name: str) -> Any:
    """Returns the value as `kind`, or raises; a whole number is a legal float, a bool is no number."""
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        _require(value in choices, f"{name}={value!r}; legal are {', '.join(choices)}")
        return value
    if isinstance(kind, types.GenericAlias):
        ok = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
        _require(ok, f"{name}={value!r}; it must be a list of strings")
        return tuple(value)
    legal = (int, float) if kind is float else (kind,)
    _require(type(value) in legal, f"{name}={value!r}; it must be a value of type {kind.__name__}")
    return kind(value)


def difference(saved: dict[str, Any], now: dict[str, Any], prefix: str = "") -> list[str]:
    """Names every key whose value differs: "batch_size was 4 and is 8"."""
    out = []
    for key in sorted(saved.keys() | now.keys()):
        old, new = saved.get(key), now.get(key)
        if key == "stages" and isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
            for a, b in zip(old, new, strict=True):
                out += difference(a, b, f"stage {b['name']!r}: ")
        elif isinstance(old, dict) and isinstance(new, dict):
            out += difference(old, new, f"{prefix}{key}.")
        elif old != new:
            out.append(f"{prefix}{key} was {old!r} and is {new!r}")
    return out
