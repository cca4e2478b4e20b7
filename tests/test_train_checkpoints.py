"""Runs that stop: killed at any moment they continue bit for bit, and never under other settings."""

import dataclasses
import functools
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import environment

from v41jax.training import corpus, data
from v41jax.training.checkpoints import Checkpoints
from v41jax.training.loop import train
from v41jax.training.progress import METRICS, read_metrics
from v41jax.training.settings import Settings, Stage

VOCABULARY, ROW = 11, 8
SETTINGS = Settings(
    row_length=ROW,
    batch_size=2,
    save_every=3,
    stages=(Stage(name="one", steps=7), Stage(name="two", steps=8, learning_rate=3e-3), Stage(name="three", steps=3)),
)
MODEL = {"vocabulary": VOCABULARY, "layers": [1, 2]}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Toy:
    """A bigram model with noise from its random key."""

    params: dict
    optimizer: optax.OptState
    key: jax.Array


@functools.cache
def make_step(learning_rate: float):
    optimizer = optax.adam(learning_rate)

    @jax.jit
    def step(state: Toy, batch):
        key, noise = jax.random.split(state.key)

        def loss(params):
            tokens = batch["tokens_BT"]
            logits = params["table"][tokens[:, :-1]] + jax.random.normal(noise, (VOCABULARY,))
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        with jax.numpy_dtype_promotion("standard"):
            updates, opt = optimizer.update(grads, state.optimizer)
        return Toy(optax.apply_updates(state.params, updates), opt, key), {"loss": value, "expert_load": jnp.ones(3)}

    return optimizer, step


def begin(stage: Stage, params):
    optimizer, step = make_step(stage.learning_rate)
    return Toy(params, optimizer.init(params), jax.random.key(7)), step


class Slow:
    """Batches that take a moment, so that a kill has something to hit."""

    def __init__(self, batches, seconds):
        self._batches, self._seconds = batches, seconds

    def __next__(self):
        time.sleep(self._seconds)
        return next(self._batches)

    def __getattr__(self, name):
        return getattr(self._batches, name)


def run(output: pathlib.Path, *, settings=SETTINGS, model=MODEL, seconds=0.0):
    tokens_N = np.random.default_rng(0).integers(VOCABULARY, size=400, dtype=np.int32)
    rows = data.PackedRows(corpus.Corpus(tokens_N=tokens_N, start_K=np.array([0, 90, 130, 400])), ROW)
    batches = data.train_batches([(rows, 1.0)], batch_size=settings.batch_size, seed=settings.seed)
    params = {"table": jnp.zeros((VOCABULARY, VOCABULARY))}
    return train(
        begin, params, Slow(batches, seconds), settings=settings, model=model, output=output, tensorboard=False
    )


def losses(output):
    return [(record["step"], record["stage"], record["loss"]) for record in read_metrics(output)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run: its directory and weights."""
    output = tmp_path_factory.mktemp("whole")
    return output, np.asarray(run(output)["table"])


def test_a_run_goes_through_its_stages_and_draws_them(whole):
    output, table = whole
    names = [name for _, name, _ in losses(output)]
    assert names == ["one"] * 7 + ["two"] * 8 + ["three"] * 3
    assert np.any(table) and (output / "loss.png").stat().st_size and (output / "expert_load.png").stat().st_size
    assert not (output / "kl.png").exists()


def test_a_finished_run_continues_to_nothing(whole):
    output, table = whole
    before = (output / METRICS).read_text()
    np.testing.assert_array_equal(np.asarray(run(output)["table"]), table)
    assert (output / METRICS).read_text() == before


class Killed(Exception):
    pass


@pytest.mark.parametrize("stop", [2, 3, 7, 8, 15, 17])
def test_a_run_stopped_before_any_step_continues_bit_for_bit(whole, tmp_path, monkeypatch, stop):
    class Stops(Slow):
        def __next__(self):
            self.left = getattr(self, "left", stop) - 1
            if self.left < 0:
                raise Killed
            return super().__next__()

    with monkeypatch.context() as patch:
        patch.setitem(globals(), "Slow", Stops)
        with pytest.raises(Killed):
            run(tmp_path)
    assert len(losses(tmp_path)) == stop
    np.testing.assert_array_equal(np.asarray(run(tmp_path)["table"]), whole[1])
    assert losses(tmp_path) == losses(whole[0])


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_run_killed_at_a_random_moment_continues_bit_for_bit(whole, tmp_path, seed):
    kill_after, lost = random.Random(seed).uniform(0.2, 2.5), []
    child = [sys.executable, __file__, str(tmp_path)]
    with subprocess.Popen(child, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
    with Checkpoints(tmp_path / "checkpoints", settings=SETTINGS, model=MODEL) as checkpoints:
        lost.append(len(losses(tmp_path)) - (checkpoints.latest or 0))
    # One interval since the save, and the one during which the save was still being written.
    assert lost[0] <= 2 * SETTINGS.save_every
    np.testing.assert_array_equal(np.asarray(run(tmp_path)["table"]), whole[1])
    assert losses(tmp_path) == losses(whole[0])


def test_other_settings_are_refused_by_name(whole):
    output, _ = whole
    stages = (*SETTINGS.stages[:2], dataclasses.replace(SETTINGS.stages[2], learning_rate=0.5))
    settings = dataclasses.replace(SETTINGS, seed=3, stages=stages)
    message = "seed was 0 and is 3; stage 'three': learning_rate was 0.001 and is 0.5"
    with pytest.raises(ValueError, match=re.escape(message)):
        run(output, settings=settings)
    with pytest.raises(ValueError, match=r"model\.layers was \[1, 2\] and is \[1, 3\]"):
        run(output, model={**MODEL, "layers": [1, 3]})


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path):
    stages = (Stage(name="one", steps=4, learning_rate=1e38),)
    with pytest.raises(ValueError, match=r"the loss of step \d .*learning_rate=1e\+38 may be too high"):
        run(tmp_path, settings=dataclasses.replace(SETTINGS, stages=stages))


def test_metrics_are_one_json_object_a_line(whole):
    records = [json.loads(line) for line in (whole[0] / METRICS).read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(1, 19))
    assert {"stage", "loss", "tokens_per_second", "memory_bytes", "expert_load"} <= records[0].keys()


if __name__ == "__main__":
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    print("ready", flush=True)
    run(pathlib.Path(sys.argv[1]), seconds=0.1)
