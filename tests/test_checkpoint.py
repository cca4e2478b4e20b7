"""Checkpoints: what is loaded, written, refused, and how much memory that takes."""

import contextlib
import importlib.util
import json
import logging
import math
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors import safe_open

from v41jax import checkpoint, config_json, quant, safetensors, tree
from v41jax.quant import Packed

ROOT = pathlib.Path(__file__).parents[1]
PACKED = ROOT / "v41jax" / "assets" / "tiny-fp8fp4"
PLAIN = ROOT / "tests" / "golden" / "tiny-f32"
GOLDEN = [pytest.param(PACKED, "bfloat16", id="fp8fp4"), pytest.param(PLAIN, "float32", id="f32")]
INDEX = "model.safetensors.index.json"


# ---- the file format, written out a second time


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


@pytest.fixture
def copy(tmp_path):
    """A copy of the FP8 and FP4 checkpoint, to damage."""
    return shutil.copytree(PACKED, tmp_path / "copy")


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name, *args, devices=1):
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, str(ROOT / "scripts" / f"{name}.py"), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def assert_same(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(one), jax.tree.leaves(two), strict=True):
        assert a.dtype == b.dtype, path
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b), err_msg=str(path))


# ---- loading


@pytest.mark.parametrize(("path", "dtype"), GOLDEN)
def test_load_gives_what_the_files_hold(path, dtype):
    cfg, params = checkpoint.load_checkpoint(path, dtype=dtype)
    assert cfg == config_json.load_config(path)
    files = read_all(path)
    numpy = {"F32": np.float32, "BF16": jnp.bfloat16, "I8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}

    def stored(name):
        kind, shape, values = files.pop(name)
        return np.frombuffer(values, numpy[kind]).reshape(shape)

    def stacked(path, suffix, experts):
        front, _, last = path.rpartition(".")
        return np.stack([stored(f"{front}.{e}.{last}{suffix}") for e in range(experts)])

    leaves = jax.tree.leaves(params, is_leaf=lambda leaf: isinstance(leaf, Packed))
    for (name, spec), leaf in zip(tree.walk(checkpoint.model.specs(cfg)), leaves, strict=True):
        if not spec.released:
            continue
        experts = spec.shape[0] if spec.per_expert else None
        planes = {spec.suffix: leaf} if spec.format is None else {spec.suffix: leaf.codes, ".scale": leaf.scales}
        for suffix, plane in planes.items():
            want = stored(name + suffix) if experts is None else stacked(name, suffix, experts)
            assert isinstance(plane, jax.Array)
            assert plane.dtype == want.dtype, name
            np.testing.assert_array_equal(np.asarray(plane), want, err_msg=name)
    assert not files
    assert params["token_map"].dtype == jnp.int32


@pytest.mark.parametrize("dtype", ["float32", jnp.float32, np.dtype(np.float32)])
def test_dtype_casts_only_what_it_may(dtype):
    _, narrow = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    _, wide = checkpoint.load_checkpoint(PACKED, dtype=dtype)
    assert wide["embed"].dtype == jnp.float32
    assert narrow["embed"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(wide["embed"], narrow["embed"].astype(jnp.float32))
    for params in (narrow, wide):
        assert params["layers"][0]["hc_attn_fn"].dtype == jnp.float32
        assert params["layers"][0]["attn"]["wq_a"].codes.dtype == jnp.uint8


def test_load_rounds_float32_to_bfloat16():
    _, wide = checkpoint.load_checkpoint(PLAIN, dtype="float32")
    _, narrow = checkpoint.load_checkpoint(PLAIN, dtype=jnp.bfloat16)
    experts = wide["layers"][2]["ffn"]["experts"]["w1"]
    np.testing.assert_array_equal(narrow["layers"][2]["ffn"]["experts"]["w1"], experts.astype(jnp.bfloat16))


@pytest.mark.parametrize("dtype", ["float16", "int8", "bananas", None, jnp.float8_e4m3fn])
def test_load_refuses_other_dtypes(dtype):
    with pytest.raises(ValueError, match="bfloat16, float32"):
        checkpoint.load_checkpoint(PACKED, dtype=dtype)


def test_e8m0_byte_120_is_two_to_minus_7(copy):
    name = "layers.2.attn.wq_a"
    with edited(copy, f"{name}.weight") as tensors:
        kind, shape, values = tensors[f"{name}.weight"]
        tensors[f"{name}.weight"] = (kind, shape, b"\x38" * len(values))  # E4M3 1.0
        kind, shape, values = tensors[f"{name}.scale"]
        tensors[f"{name}.scale"] = (kind, shape, bytes([120] * len(values)))
    _, params = checkpoint.load_checkpoint(copy, dtype="bfloat16")
    values = quant.dequantize(params["layers"][2]["attn"]["wq_a"], jnp.float32)
    np.testing.assert_array_equal(values, np.full((32, 64), 0.0078125, np.float32))


def test_one_file_without_an_index(copy):
    _, want = checkpoint.load_checkpoint(copy, dtype="bfloat16")
    tensors = read_all(copy)
    for file in [*copy.glob("*.safetensors"), copy / INDEX]:
        file.unlink()
    write_shard(copy / "model.safetensors", tensors)
    _, params = checkpoint.load_checkpoint(copy, dtype="bfloat16")
    assert_same(params, want)


def test_vision_tensors_are_skipped_and_counted(copy, caplog):
    with edited(copy, "norm.weight") as tensors:
        extra = ("vision.blocks.0.attn.qkv.weight", "aligner.proj.weight", "image_start", "image_newline")
        tensors |= dict.fromkeys(extra, ("BF16", [2, 2], bytes(8)))
    assert checkpoint.check_checkpoint(copy).skipped == 4
    with caplog.at_level(logging.INFO):
        checkpoint.load_checkpoint(copy, dtype="bfloat16")
    assert "skipped 4 tensors of the vision path" in caplog.text


# ---- damage: every case says what must be listed, and nothing else may be


def drop(name):
    def damage(path):
        with edited(path, name) as tensors:
            del tensors[name]

    return damage


def retype(name, dtype, shape=None):
    return lambda path: retyped(path, name, dtype, shape)


def add(name):
    def damage(path):
        with edited(path, "norm.weight") as tensors:
            tensors[name] = ("BF16", [3], bytes(6))

    return damage


def rewrite_bytes(name, change):
    """Changes the raw bytes of the shard that holds `name`."""

    def damage(path):
        file = shard_of(path, name)
        file.write_bytes(change(file.read_bytes()))

    return damage


def edit_header(change):
    def damage(path):
        file = shard_of(path, "norm.weight")
        raw = file.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return damage


def edit_index(change):
    def damage(path):
        with edited_json(path / INDEX) as index:
            change(index["weight_map"])

    return damage


def unlink(name):
    return lambda path: (path / name).unlink()


LAST = "model-00003-of-00003.safetensors"
DAMAGE = {
    "missing tensor": (
        drop("layers.2.attn.wq_a.weight"),
        ["layers.2.attn.wq_a.weight: missing, expected F8_E4M3 [32, 64], stored as fp8_e8m0_32x32"],
    ),
    "missing expert": (
        drop("layers.2.ffn.experts.3.w2.weight"),
        ["layers.2.ffn.experts.3.w2.weight: missing, expected I8 [64, 16], stored as fp4_e8m0_32"],
    ),
    "missing draft scale": (
        drop("mtp.0.attn.wq_a.scale"),
        [
            "mtp.0.attn.wq_a.scale: missing, expected F8_E8M0 [1, 2], one scale per 32x32 block of"
            " mtp.0.attn.wq_a.weight, stored as fp8_e8m0_32x32; draft stages are quantised like the backbone"
        ],
    ),
    "unexpected tensor": (add("layers.2.hc_head_fn"), ["layers.2.hc_head_fn: unexpected, found BF16 [3]"]),
    "wrong shape": (
        retype("layers.0.attn.wo_a.weight", "F8_E4M3", [32, 128]),
        ["layers.0.attn.wo_a.weight: expected F8_E4M3 [64, 64], found F8_E4M3 [32, 128]"],
    ),
    "wrong rank": (
        retype("norm.weight", "BF16", [64, 1]),
        ["norm.weight: expected BF16 or F32 [64], found BF16 [64, 1]"],
    ),
    "fnuz": (
        retype("layers.0.attn.wo_a.weight", "F8_E4M3FNUZ"),
        ["wo_a.weight: expected F8_E4M3 [64, 64], found F8_E4M3FNUZ [64, 64] (", "F8_E4M3FNUZ codes stand for other"],
    ),
    "bf16 for fp8": (
        retype("layers.0.attn.wo_a.weight", "BF16"),
        ["layers.0.attn.wo_a.weight: expected F8_E4M3 [64, 64], found BF16 [64, 64]"],
    ),
    "fp8 experts": (
        retype("layers.0.ffn.experts.0.w1.weight", "F8_E4M3", [32, 64]),
        ["layers.0.ffn.experts.0.w1.weight: expected I8 [32, 32], found F8_E4M3 [32, 64]"],
    ),
    "float scale": (
        retype("layers.0.attn.wo_a.scale", "F32"),
        ["layers.0.attn.wo_a.scale: expected F8_E8M0 [2, 2], found F32 [2, 2]", "E8M0 is the exponent as a byte"],
    ),
    "scales of 128x128": (
        retype("layers.0.attn.wo_a.scale", "F8_E8M0", [1, 1]),
        ["layers.0.attn.wo_a.scale: expected F8_E8M0 [2, 2], found F8_E8M0 [1, 1]"],
    ),
    "bf16 for f32": (
        retype("layers.0.hc_attn_scale", "BF16"),
        ["layers.0.hc_attn_scale: expected F32 [3], found BF16 [3] (kept in float32)"],
    ),
    "f16": (retype("embed.weight", "F16"), ["embed.weight: expected BF16 or F32 [512, 64], found F16 [512, 64]"]),
    "truncated shard": (
        rewrite_bytes("norm.weight", lambda raw: raw[:-100]),
        [f"{LAST}: truncated, its header promises 461094 bytes and it has 460994"],
    ),
    "cut in the header": (rewrite_bytes("norm.weight", lambda raw: raw[:1000]), [f"{LAST}: garbage or cut short"]),
    "empty shard": (rewrite_bytes("norm.weight", lambda raw: b""), [f"{LAST}: garbage or cut short"]),
    "bytes behind": (
        rewrite_bytes("norm.weight", lambda raw: raw + b"??"),
        [f"{LAST}: 2 bytes follow the last tensor"],
    ),
    "garbage header": (
        rewrite_bytes("norm.weight", lambda raw: raw[:8] + b"\xff" * 100 + raw[108:]),
        [f"{LAST}: its header is not JSON"],
    ),
    "header is a list": (
        rewrite_bytes("norm.weight", lambda raw: b"\2" + bytes(7) + b"[]"),
        [f"{LAST}: its header is a"],
    ),
    "overlap": (
        edit_header(lambda header: header["norm.weight"].update(data_offsets=[0, 128])),
        [f"{LAST}: ", " overlaps the tensor before it"],
    ),
    "size and shape differ": (
        edit_header(lambda header: header["norm.weight"].update(shape=[65])),
        [f"{LAST}: norm.weight: BF16 [65] does not fill bytes"],
    ),
    "entry without dtype": (
        edit_header(lambda header: header["norm.weight"].pop("dtype")),
        [f"{LAST}: norm.weight: its header entry has no dtype"],
    ),
    "missing shard": (unlink(LAST), [f"{LAST}: this shard is missing; {INDEX} places"]),
    "shard elsewhere": (
        edit_index(lambda names: names.update({"norm.weight": "../copy/" + LAST})),
        [f"../copy/{LAST}: this shard is missing", f"norm.weight: {LAST} holds it, but {INDEX} says ../copy/{LAST}"],
    ),
    "index names what the shard lacks": (
        edit_index(lambda names: names.update({"layers.0.ghost": LAST})),
        [f"layers.0.ghost: {INDEX} places it in {LAST}, which lacks it"],
    ),
    "index lacks what the shard holds": (
        edit_index(lambda names: names.pop("norm.weight")),
        [f"norm.weight: {LAST} holds it, but {INDEX} says nothing of it"],
    ),
    "index is garbage": (lambda path: (path / INDEX).write_text("{"), [f"{INDEX} is not JSON with a weight_map"]),
    "index without a map": (lambda path: (path / INDEX).write_text("[]"), [f"{INDEX} is not JSON with a weight_map"]),
    "no index": (unlink(INDEX), [f"holds neither {INDEX} nor model.safetensors"]),
    "no config": (unlink("config.json"), ["config.json does not exist"]),
    "no tokenizer": (unlink("tokenizer.json"), ["tokenizer.json is missing; Engram's token map is derived from it"]),
}
LINES = {"shard elsewhere": 2}  # how many problems a case is; 1 for the others


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_named_and_nothing_is_read(copy, case, monkeypatch):
    damage, wanted = DAMAGE[case]
    damage(copy)
    monkeypatch.setattr(safetensors, "read_into", None)
    with pytest.raises(ValueError) as error:
        checkpoint.load_checkpoint(copy, dtype="bfloat16")
    for text in wanted:
        assert text in str(error.value)
    assert len(checkpoint.check_checkpoint(copy).problems) == LINES.get(case, 1)


def test_all_damage_is_listed_at_once(copy):
    cases = ["missing tensor", "missing draft scale", "unexpected tensor", "wrong shape", "float scale", "no tokenizer"]
    for case in [*cases, "truncated shard"]:  # raw bytes last: the others rewrite their shard
        DAMAGE[case][0](copy)
    with pytest.raises(ValueError, match="7 problems") as error:
        checkpoint.load_checkpoint(copy, dtype="bfloat16")
    for text in (text for case in cases for text in DAMAGE[case][1]):
        assert text in str(error.value)
    assert f"{LAST}: truncated" in str(error.value)


def test_long_lists_are_cut_and_counted(copy):
    count = 0
    for file in copy.glob("*.safetensors"):
        tensors = read_shard(file)
        count += sum(name.endswith(".scale") for name in tensors)
        write_shard(file, {name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")})
    with edited_json(copy / INDEX) as index:
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.endswith(".scale")}
    problems = checkpoint.check_checkpoint(copy).problems
    assert len(problems) == count + 1
    assert "no tensor ends in .scale" in problems[0]
    with pytest.raises(ValueError) as error:
        checkpoint.load_checkpoint(copy, dtype="bfloat16")
    assert str(error.value).endswith(f"... and {count + 1 - 50} more")
    assert len(str(error.value).splitlines()) == 52


def test_likely_cause_of_a_config_that_is_not_of_these_files(tmp_path):
    plain, packed = shutil.copytree(PLAIN, tmp_path / "plain"), shutil.copytree(PACKED, tmp_path / "packed")
    with edited_json(packed / "config.json") as source:
        rule = source.pop("quantization_config")
    with edited_json(plain / "config.json") as source:
        source["quantization_config"] = rule
    assert "has a quantization_config, but the" in checkpoint.check_checkpoint(plain).problems[0]
    assert "has no quantization_config, but" in checkpoint.check_checkpoint(packed).problems[0]


def test_check_takes_a_config(copy):
    (copy / "config.json").unlink()
    assert not checkpoint.check_checkpoint(copy, config_json.load_config(PACKED)).problems


def test_check_refuses_what_is_no_directory(tmp_path):
    with pytest.raises(ValueError, match="is not a directory"):
        checkpoint.check_checkpoint(tmp_path / "nothing")


# ---- saving


@pytest.mark.parametrize(("path", "dtype"), GOLDEN)
@pytest.mark.parametrize("shard_bytes", [5 * 10**9, 200_000])
def test_saved_tensors_are_byte_identical(tmp_path, path, dtype, shard_bytes):
    cfg, params = checkpoint.load_checkpoint(path, dtype=dtype)
    saved = tmp_path / "saved"
    checkpoint.save_checkpoint(saved, params, cfg=cfg, tokenizer=path / "tokenizer.json", shard_bytes=shard_bytes)
    assert read_all(saved) == read_all(path)
    assert config_json.load_config(saved) == cfg
    assert (saved / "tokenizer.json").read_bytes() == (path / "tokenizer.json").read_bytes()
    again, reloaded = checkpoint.load_checkpoint(saved, dtype=dtype)
    assert again == cfg
    assert_same(reloaded, params)

    index = json.loads((saved / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(len(values) for *_, values in read_all(path).values())
    files = sorted(set(index["weight_map"].values()))
    assert files == sorted(file.name for file in saved.glob("*.safetensors"))
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert (len(files) > 1) == (shard_bytes == 200_000)
    sizes = [[len(values) for *_, values in read_shard(saved / file).values()] for file in files]
    assert all(sum(size) <= shard_bytes or len(size) == 1 for size in sizes)


@pytest.mark.parametrize(("path", "dtype"), GOLDEN)
def test_the_safetensors_library_reads_what_we_write(tmp_path, path, dtype):
    cfg, params = checkpoint.load_checkpoint(path, dtype=dtype)
    checkpoint.save_checkpoint(tmp_path / "saved", params, cfg=cfg, shard_bytes=500_000)
    want, names = read_all(path), set()
    for file in (tmp_path / "saved").glob("*.safetensors"):
        with safe_open(file, framework="np") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                kind, shape, values = want[name]
                view = opened.get_slice(name)
                assert (view.get_dtype(), view.get_shape()) == (kind, shape)
                if kind in ("F32", "BF16", "I8"):
                    assert opened.get_tensor(name).tobytes() == values
                names.add(name)
    assert names == want.keys()


def test_wider_tensors_come_first_so_that_all_are_aligned(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    checkpoint.save_checkpoint(tmp_path / "saved", params, cfg=cfg)
    for file in (tmp_path / "saved").glob("*.safetensors"):
        for name, tensor in safetensors.read_header(file)[0].items():
            assert tensor.offset % safetensors.STORED[tensor.dtype].itemsize == 0, name


def spread(params, devices):
    """Shards every array over `devices`, along whichever axis they divide."""
    mesh = jax.make_mesh((len(devices),), ("x",), axis_types=(AxisType.Auto,), devices=devices)

    def sharding(array):
        axes = [axis for axis, size in enumerate(array.shape) if size % len(devices) == 0]
        return NamedSharding(mesh, P(*[None] * axes[-1], "x") if axes else P())

    return jax.tree.map(sharding, params)


def test_sharded_parameters_are_saved_alike(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    params = jax.device_put(params, spread(params, jax.devices()))
    assert sum(not leaf.is_fully_replicated for leaf in jax.tree.leaves(params)) > 100
    checkpoint.save_checkpoint(tmp_path / "saved", params, cfg=cfg)
    assert read_all(tmp_path / "saved") == read_all(PACKED)


def test_large_arrays_are_fetched_in_blocks(tmp_path, monkeypatch):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    monkeypatch.setattr(checkpoint, "BLOCK", 1000)
    monkeypatch.setattr(safetensors, "PIECE", 1000)
    checkpoint.save_checkpoint(tmp_path / "saved", params, cfg=cfg, tokenizer=PACKED / "tokenizer.json")
    assert read_all(tmp_path / "saved") == read_all(PACKED)
    assert_same(checkpoint.load_checkpoint(tmp_path / "saved", dtype="bfloat16")[1], params)


def test_load_takes_shardings():
    _, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    shardings = spread(params, jax.devices()[:2])
    _, sharded = checkpoint.load_checkpoint(PACKED, dtype="bfloat16", shardings=shardings)
    assert_same(sharded, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, sharded) == shardings


SAVES = [checkpoint.save_checkpoint, checkpoint.save_orbax]


@pytest.mark.parametrize("save", SAVES)
def test_save_refuses_a_directory_that_holds_anything(tmp_path, save):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    target = tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="is not an empty directory"):
        save(target, params, cfg=cfg)
    with pytest.raises(ValueError, match="is not an empty directory"):
        save(target / "notes.txt", params, cfg=cfg)
    with pytest.raises(ValueError, match="is not a file"):
        save(tmp_path / "new", params, cfg=cfg, tokenizer=tmp_path / "tokenizer.json")
    assert [file.name for file in tmp_path.rglob("*")] == ["target", "notes.txt"]
    assert (target / "notes.txt").read_text() == "mine"
    (target / "notes.txt").unlink()
    save(target, params, cfg=cfg)  # empty is fine


@pytest.mark.parametrize("save", SAVES)
def test_save_refuses_parameters_of_another_config(tmp_path, save):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    codes = params["layers"][0]["attn"]["wq_a"]
    params["layers"][0]["attn"]["wq_a"] = Packed(codes.codes[:-1], codes.scales, codes.format)
    params["layers"][2]["attn"]["wq_a"] = quant.dequantize(codes, jnp.float32)
    params["norm"] = params["norm"].astype(jnp.float16)
    params["layers"][0]["hc_attn_scale"] = params["layers"][0]["hc_attn_scale"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="not those of this config; 6 problems") as error:
        save(tmp_path / "new", params, cfg=cfg)
    for text in (
        "layers.0.attn.wq_a.codes: expected uint8 [32, 64], found uint8 [31, 64]",
        "layers.2.attn.wq_a.codes: missing, expected uint8 [32, 64]",
        "layers.2.attn.wq_a.scales: missing",
        "layers.2.attn.wq_a: unexpected",
        "norm: expected bfloat16 or float32 [64], found float16 [64]",
        "layers.0.hc_attn_scale: expected float32 [3], found bfloat16 [3]",
    ):
        assert text in str(error.value)
    assert not list(tmp_path.iterdir())


def test_save_refuses_empty_shards(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    with pytest.raises(ValueError, match="shard_bytes=0"):
        checkpoint.save_checkpoint(tmp_path / "new", params, cfg=cfg, shard_bytes=0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_save_leaves_nothing_that_loads(tmp_path, monkeypatch, killed):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    write_file, calls = safetensors.write_file, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        write_file(*args, **kwargs)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(safetensors, "write_file", interrupted)
    if killed:  # no clean-up either
        monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_checkpoint(
            tmp_path / "saved", params, cfg=cfg, tokenizer=PACKED / "tokenizer.json", shard_bytes=300_000
        )
    assert not (tmp_path / "saved").exists()
    left = list(tmp_path.iterdir())
    assert len(left) == killed
    for directory in left:
        with pytest.raises(ValueError, match=r"config\.json does not exist"):
            checkpoint.load_checkpoint(directory, dtype="bfloat16")


def test_an_interrupted_orbax_save_leaves_nothing_that_loads(tmp_path, monkeypatch):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")

    def interrupted(cfg):
        raise KeyboardInterrupt

    monkeypatch.setattr(config_json, "to_json", interrupted)  # Orbax itself is done by then
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_orbax(tmp_path / "saved", params, cfg=cfg)
    assert not list(tmp_path.iterdir())


# ---- Orbax


@pytest.mark.parametrize(("path", "dtype"), GOLDEN)
def test_orbax_round_trip(tmp_path, path, dtype):
    cfg, params = checkpoint.load_checkpoint(path, dtype=dtype)
    checkpoint.save_orbax(tmp_path / "saved", params, cfg=cfg)
    assert checkpoint.is_orbax(tmp_path / "saved")
    again, restored = checkpoint.restore_orbax(tmp_path / "saved")
    assert again == cfg
    assert_same(restored, params)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(restored))


def test_orbax_casts_only_what_it_may(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    checkpoint.save_orbax(tmp_path / "saved", params, cfg=cfg)
    _, wide = checkpoint.restore_orbax(tmp_path / "saved", dtype="float32")
    assert_same(wide, checkpoint.load_checkpoint(PACKED, dtype="float32")[1])
    with pytest.raises(ValueError, match="bfloat16, float32"):
        checkpoint.restore_orbax(tmp_path / "saved", dtype="float16")


def test_orbax_of_8_devices_restores_on_1_and_2(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    spread_out = jax.device_put(params, spread(params, jax.devices()))
    saved, back = tmp_path / "saved", tmp_path / "back"
    checkpoint.save_orbax(saved, spread_out, cfg=cfg, tokenizer=PACKED / "tokenizer.json")

    shardings = spread(params, jax.devices()[:2])
    _, on_two = checkpoint.restore_orbax(saved, shardings=shardings)
    assert_same(on_two, params)
    assert jax.tree.map(lambda leaf: leaf.sharding, on_two) == shardings

    done = run_script("convert_checkpoint", saved, back, devices=1)  # a process that has one device only
    assert done.returncode == 0, done.stderr
    assert read_all(back) == read_all(PACKED)
    assert (back / "tokenizer.json").read_bytes() == (PACKED / "tokenizer.json").read_bytes()


def test_restore_refuses_what_is_no_orbax_checkpoint(tmp_path):
    for path in (tmp_path / "nothing", tmp_path, PACKED):
        with pytest.raises(ValueError, match="is not an Orbax checkpoint"):
            checkpoint.restore_orbax(path)


def test_restore_refuses_a_config_of_another_model(tmp_path):
    cfg, params = checkpoint.load_checkpoint(PACKED, dtype="bfloat16")
    checkpoint.save_orbax(tmp_path / "saved", params, cfg=cfg)
    with edited_json(tmp_path / "saved" / "config.json") as source:
        source["text_config"]["q_lora_rank"] = 64
    with pytest.raises(ValueError, match="not those of this config") as error:
        checkpoint.restore_orbax(tmp_path / "saved")
    assert "layers.0.attn.q_norm: expected bfloat16 or float32 [64], found bfloat16 [32]" in str(error.value)


# ---- scripts


def test_convert_both_ways(tmp_path, capsys):
    main = load_script("convert_checkpoint").main
    for path, _ in ((PACKED, None), (PLAIN, None)):
        orbax, back = tmp_path / f"{path.name}-orbax", tmp_path / f"{path.name}-back"
        assert main([str(path), str(orbax)]) == 0
        assert main([str(orbax), str(back)]) == 0
        assert read_all(back) == read_all(path)
    assert main([str(PLAIN), str(tmp_path / "narrow"), "--dtype", "bfloat16"]) == 0
    assert checkpoint.restore_orbax(tmp_path / "narrow")[1]["embed"].dtype == jnp.bfloat16
    capsys.readouterr()
    assert main([str(PACKED), str(tmp_path / "narrow")]) == 1
    assert capsys.readouterr().err.startswith("error: ")
    assert main([str(tmp_path / "nothing"), str(tmp_path / "new")]) == 1
    assert "is not a directory" in capsys.readouterr().err


def test_convert_check(copy, capsys):
    main = load_script("convert_checkpoint").main
    assert main(["--check", str(copy)]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^F8_E4M3 +98 +428,160$", out, re.MULTILINE)
    assert re.search(r"^all +742 +1,415,156$", out, re.MULTILINE)
    assert re.search(r"^engram +34,944 parameters$", out, re.MULTILINE)
    assert f"OK: {copy}" in out

    DAMAGE["missing tensor"][0](copy)
    DAMAGE["float scale"][0](copy)
    assert main(["--check", str(copy)]) == 1
    out = capsys.readouterr().out
    assert "problem: " + DAMAGE["missing tensor"][1][0] in out
    assert "problem: " + DAMAGE["float scale"][1][0] in out
    assert f"2 problems in {copy}" in out
    assert "OK" not in out


@pytest.mark.parametrize("argv", [[], ["one"], ["--check"], ["--check", "a", "b"], ["a", "b", "--dtype", "int8"]])
def test_convert_refuses_bad_usage(argv, capsys):
    with pytest.raises(SystemExit) as exit:
        load_script("convert_checkpoint").main(argv)
    assert exit.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.skipif(not pathlib.Path("/proc/self/clear_refs").exists(), reason="only Linux resets a process's peak")
def test_a_load_takes_little_memory_beside_the_arrays(tmp_path):
    """The kernel's own peak of a fresh process; the largest array comes last, so that nothing hides behind others."""
    done = run_script("benchmark_load", "--gigabytes", "0.15", "--directory", tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"extra host memory: (-?[\d.]+) MiB .* of ([\d.]+) MiB; the arrays are ([\d.]+) MiB", done.stdout)
    assert found is not None, done.stdout
    extra, largest, arrays = map(float, found.groups())
    assert arrays > 4 * largest  # else a loader that keeps everything twice would pass
    assert extra < largest  # 1.5 times is allowed; a second copy of the largest array alone would be 1
    assert not list(tmp_path.iterdir())
