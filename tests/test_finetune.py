"""Settings, progress, and the scripts around a training run."""

import dataclasses
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import SCRIPTS, load_script

from v41jax import config, config_json, engram, load_checkpoint, model, quant, tree
from v41jax.assets import BUILT_IN
from v41jax.quant import Packed
from v41jax.release import TOKENIZER
from v41jax.training import export, progress
from v41jax.training.settings import Settings, Stage, from_dict, read_settings, to_dict

pytestmark = pytest.mark.usefixtures("quick_compilation")

# ---- settings


def test_settings_survive_toml_and_json(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('batch_size = 4\ntext = ["a", "b"]\n[[stages]]\nname = "x"\nlearning_rate = 1\nqat = true\n')
    settings = read_settings(path, seed=5)
    stage = Stage(name="x", learning_rate=1.0, qat=True)
    assert settings == Settings(batch_size=4, text=("a", "b"), seed=5, stages=(stage,))
    assert from_dict(json.loads(json.dumps(to_dict(settings)))) == settings


@pytest.mark.parametrize(
    "text, message",
    [
        ("batchsize = 4", "settings has no key 'batchsize'; keys are seed, text, "),
        ("[[stages]]\nlr = 4", "a stage has no key 'lr'; keys are name, steps, "),
        ("batch_size = 2.0", "batch_size=2.0; it must be a value of type int"),
        ("batch_size = true", "batch_size=True; it must be a value of type int"),
        ("batch_size = 0", "batch_size=0; it must be 1 or more"),
        ("batch_size = 3\nmicro_batches = 2", "batch_size=3 is not a multiple of micro_batches=2"),
        ("row_length = 1", "row_length=1; it must be 2 or more"),
        ("passkey_share = 1.5", "passkey_share=1.5; it must be 0 to 1"),
        ("clip = 0", "clip=0.0; it must be over 0"),
        ("kl_weight = -1", "kl_weight=-1.0; it must be 0 or more"),
        ("dtype = 'float16'", "dtype='float16'; legal are float32, bfloat16"),
        ("text = 'a'", "text='a'; it must be a list of strings"),
        ("text = [1]", "text=[1]; it must be a list of strings"),
        ("stages = []", "there is no stage"),
        ("stages = 3", "stages is no list of tables"),
        ("[[stages]]\nname='a'\n[[stages]]\nname='a'", "stages are named ['a', 'a']; names must differ"),
        ("[[stages]]\nsteps = 0", "steps=0 is too small"),
        ("[[stages]]\nsteps = 5\ndecay_steps = 6", "a schedule of 6 steps exceeds steps=5"),
        ("[[stages]]\nlearning_rate = 0", "learning_rate=0.0 must be over 0"),
        ("batch_size = ", "settings.toml is not TOML: "),
    ],
)
def test_settings_that_cannot_be_are_refused_in_one_sentence(tmp_path, text, message):
    path = tmp_path / "settings.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)) as refusal:
        read_settings(path)
    assert "\n" not in str(refusal.value)


def test_a_settings_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"absent\.toml cannot be read: No such file"):
        read_settings(tmp_path / "absent.toml")


# ---- progress


def test_progress_drops_what_is_run_again(tmp_path):
    with progress.Progress(tmp_path, steps=4, tensorboard=False) as first:
        for step in (1, 2, 3):
            first.record(step, "one", {"loss": jnp.float32(step)}, tokens=8)
    with (tmp_path / progress.METRICS).open("a") as file:
        file.write('{"step": 4, "lo')  # a kill in the middle of a line
    with progress.Progress(tmp_path, steps=4, done=2, tensorboard=False) as second:
        second.record(3, "one", {"loss": jnp.float32(30)}, tokens=8)
        assert [path.name for path in second.plot()] == ["loss.png"]
    assert [(r["step"], r["loss"]) for r in progress.read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 30)]


def test_tensorboard_gets_the_scalars(tmp_path):
    with progress.Progress(tmp_path, steps=1) as bar:
        bar.record(1, "one", {"loss": 2.5, "expert_load": np.ones(3)}, tokens=8)
    files = list((tmp_path / "tensorboard").iterdir())
    assert len(files) == 1 and b"loss" in files[0].read_bytes() and b"expert_load" not in files[0].read_bytes()


def test_a_missing_extra_says_how_to_get_it():
    with pytest.raises(ValueError, match=re.escape("no_such_package is not installed; pip install 'v41jax[train]'")):
        progress.import_extra("no_such_package")


# ---- master weights


def test_master_weights_are_plain_and_go_back_to_the_released_formats():
    cfg, params = load_checkpoint(BUILT_IN, dtype=jnp.float32)
    master = export.to_master(params)
    for name, spec in tree.walk(model.specs(cfg)):
        leaf = _leaf(master, name)
        assert leaf.shape == spec.shape and leaf.dtype == (spec.dtype or jnp.float32)
    again = export.to_release(master, cfg=cfg, dtype=jnp.float32)
    assert jax.tree.structure(again) == jax.tree.structure(params)
    for got, want in zip(_decoded(again), _decoded(params), strict=True):
        np.testing.assert_array_equal(got, want)  # what a format holds, it holds again


def _leaf(params, name):
    for key in name.split("."):
        params = params[int(key) if key.isdigit() else key]
    return params


def _is_packed(leaf):
    return isinstance(leaf, Packed)


def _decoded(params):
    packed = jax.tree.leaves(params, is_leaf=_is_packed)
    return [quant.dequantize(leaf, jnp.float32) if _is_packed(leaf) else leaf for leaf in packed]


def test_the_tiny_model_fits_its_tokenizer_and_size():
    cfg = config_json.load_config(SCRIPTS / "tiny")
    assert 5e6 < sum(model.parameter_count(cfg).values()) < 1e7
    assert tree.nbytes(tree.abstract(model.specs(cfg), "bfloat16")) < 8e6
    assert {layer.role for layer in config.layer_plan(cfg)} == set(config.Role)
    settings = read_settings(SCRIPTS / "tiny.toml")
    assert settings.row_length <= cfg.max_position_embeddings
    assert cfg.pool_size < settings.row_length  # or the candidate pool would prune nothing


# ---- scripts


def test_the_micro_model_has_every_compressed_role_and_fits_its_tokenizer():
    cfg = config_json.load_config(SCRIPTS / "micro")
    assert {layer.role for layer in config.layer_plan(cfg)} == set(config.Role) - {config.Role.WINDOW}
    assert engram.token_map(SCRIPTS / "micro" / TOKENIZER, cfg).shape == (cfg.vocab_size,)


@pytest.fixture
def two_layers(tmp_path):
    """A directory with the first two layers of the micro model: fewer to compile."""
    cfg = config_json.load_config(SCRIPTS / "micro")
    sources = cfg.kv_source_layer_ids[:2]
    cfg = dataclasses.replace(
        cfg, num_hidden_layers=2, compress_ratios=cfg.compress_ratios[:2], index_source_layer_ids=sources
    )
    directory = tmp_path / "two"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config_json.to_json(cfg)))
    shutil.copy(SCRIPTS / "micro" / TOKENIZER, directory)
    return directory


def test_a_model_is_trained_and_exported(tmp_path, capsys, two_layers):
    settings = tmp_path / "settings.toml"
    settings.write_text('save_every = 1\n[[stages]]\nname = "qat"\nqat = true\nsteps = 2\n')
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 200)
    argv = [
        "--model",
        str(two_layers),
        "--settings",
        str(settings),
        "--output",
        str(tmp_path / "run"),
        "--text",
        str(tmp_path / "text.txt"),
    ]
    script = load_script("finetune_qat")
    assert script.main([*argv, "--row-length", "64"]) == 0
    records = progress.read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == [1, 2] and records[1]["loss"] < records[0]["loss"]
    assert all((tmp_path / "run" / f"{name}.png").is_file() for name in ("loss", "kl", "expert_load"))
    cfg, params = load_checkpoint(tmp_path / "run" / "model", dtype=jnp.bfloat16)
    assert cfg == config_json.load_config(two_layers)
    packed = [leaf.format for leaf in jax.tree.leaves(params, is_leaf=_is_packed) if _is_packed(leaf)]
    assert {"fp4_e8m0_32", "fp8_e8m0_32x32", "fp8_e8m0_32"} == set(packed)
    assert script.main(argv) == 2
    assert "so this run is finished" in capsys.readouterr().err


def test_the_command_line_overrides_the_file_and_says_its_defaults(tmp_path, capsys):
    script = load_script("finetune_qat")
    path = tmp_path / "settings.toml"
    path.write_text("batch_size = 4\nseed = 3\n")
    settings = script.collect(script.parse(["--settings", str(path), "--seed", "9", "--steps", "1", "2", "3"]))
    assert (settings.batch_size, settings.seed, [stage.steps for stage in settings.stages]) == (4, 9, [1, 2, 3])
    assert script.main(["--steps", "1"]) == 2
    assert "--steps gives 1 numbers for 3 stages" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        script.parse(["--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "(default: 0.2)" in shown and "(default: float32)" in shown


def test_a_tokenizer_is_trained_from_the_command_line(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("the cat and the hat and the bat sat " * 10)
    target = tmp_path / "new" / "tokenizer.json"
    argv = [str(target), "--text", str(tmp_path / "text.txt"), "--vocab-size", "270"]
    train_tokenizer = load_script("train_tokenizer")
    assert train_tokenizer.main(argv) == 0
    assert target.is_file() and "vocab_size 270, engram_compressed_vocab_size" in capsys.readouterr().out
    assert train_tokenizer.main([str(target), "--text", str(tmp_path / "absent.txt")]) == 2
    assert "absent.txt cannot be read" in capsys.readouterr().err
