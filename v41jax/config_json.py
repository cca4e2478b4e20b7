"""config.json to `Config` and back."""

import dataclasses
import json
import pathlib
from typing import Any

from v41jax.config import Config, RopeScaling, require

_TOP_LEVEL = ("bos_token_id", "eos_token_id", "pad_token_id")
_OPTIONAL = ("gate_temp", "candidate_source_layer_id", *_TOP_LEVEL)
_NOT_JSON = ("vision", "quantized", "formats")
_FIXED = {  # keys whose other values this architecture does not have
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "topk_method": "noaux_tc",
}
_QUANTIZATION = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [32, 32],
    "scale_fmt": "ue8m0",
    "expert_dtype": "fp4",
}


def from_json(source: dict[str, Any]) -> Config:
    """Reads a parsed config.json, composite (with `text_config`) or flat.

    Keys this model does not use are ignored. Raises ValueError for a missing key, for a key whose value
    the architecture does not have, and for every inconsistency `Config` itself refuses.
    """
    text = {**source, **source.get("text_config", {})}
    names = [f.name for f in dataclasses.fields(Config) if f.name not in _NOT_JSON]
    missing = [name for name in names if name not in text and name not in _OPTIONAL]
    require(not missing, f"config.json lacks {', '.join(missing)}")
    for name, only in _FIXED.items():
        require(text.get(name, only) == only, f"{name}={text.get(name)!r}; this architecture has only {only!r}")
    quantization = source.get("quantization_config", text.get("quantization_config"))
    for name, only in _QUANTIZATION.items() if quantization else ():
        value = (quantization or {}).get(name)
        require(value == only, f"quantization_config.{name}={value!r}; the released layout has {only!r}")
    values = {name: text[name] for name in names if name in text}
    values.setdefault("candidate_source_layer_id", None)
    scaling = values["rope_scaling"]
    if scaling is not None:
        kind = scaling.get("rope_type", scaling.get("type"))
        require(kind == "yarn", f"rope_scaling.rope_type={kind!r}; only 'yarn' is known")
        known = [f.name for f in dataclasses.fields(RopeScaling)]
        missing = [name for name in known if name not in scaling]
        require(not missing, f"rope_scaling lacks {', '.join(missing)}")
        values["rope_scaling"] = RopeScaling(**{name: scaling[name] for name in known})
    return Config(**values, vision="vision_config" in source, quantized=bool(quantization))


def to_json(cfg: Config) -> dict[str, Any]:
    """Writes the composite config.json that `from_json` reads back to an equal config (`formats` aside).

    Of the vision path only its presence is kept, as an empty `vision_config`.
    """
    values = {k: v for k, v in dataclasses.asdict(cfg).items() if k not in _NOT_JSON}
    top = {name: values.pop(name) for name in _TOP_LEVEL}
    if cfg.rope_scaling is not None:
        values["rope_scaling"] = {"rope_type": "yarn", **values["rope_scaling"]}
    text = {"model_type": "deepseek_v41_text", **values, **_FIXED}
    out = {"architectures": ["DeepseekV41ForCausalLM"], "model_type": "deepseek_v41", **top, "text_config": text}
    out |= {"vision_config": {}} if cfg.vision else {}
    return out | ({"quantization_config": dict(_QUANTIZATION)} if cfg.quantized else {})


def load_config(path: str | pathlib.Path) -> Config:
    """Reads `config.json`, given that file or the directory that holds it."""
    path = pathlib.Path(path)
    path = path / "config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path} does not exist; give a checkpoint directory that holds config.json")
    try:
        source = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(source, dict):
        raise ValueError(f"{path} holds a {type(source).__name__}; a config is a JSON object")
    return from_json(source)
