"""Checkpoints: what is loaded, written, restored, and how much memory that takes."""

import json
import logging
import pathlib
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoint_files import INDEX, PACKED, PLAIN, edited, edited_json, read_all, read_shard, write_shard
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import load_script, run_script
from safetensors import safe_open

from v41jax import checkpoint, config_json, quant, safetensors, tree
from v41jax.quant import Packed

GOLDEN = [pytest.param(PACKED, "bfloat16", id="fp8fp4"), pytest.param(PLAIN, "float32", id="f32")]


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
