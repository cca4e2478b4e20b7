"""Damaged checkpoints: every case says what must be listed, and nothing else may be."""

import json
import re
import shutil

import pytest
from checkpoint_files import INDEX, PACKED, PLAIN, edited, edited_json, read_shard, retyped, shard_of, write_shard
from programs import load_script

from v41jax import checkpoint, config_json, safetensors


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
