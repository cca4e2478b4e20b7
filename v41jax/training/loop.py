"""The loop of a run: stages one after another, progress, checkpoints, and continuing where a killed run stopped.

It knows no model: a stage is begun by the function it is given, which returns a state and a step.
"""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

from v41jax.training.checkpoints import Checkpoints
from v41jax.training.progress import Progress
from v41jax.training.settings import Settings, Stage


class State(Protocol):
    """What a step takes and returns: a pytree, all of which a checkpoint keeps."""

    @property
    def params(self) -> Any:
        """Master weights, which the next stage starts from."""
        ...


Step = Callable[[Any, Any], tuple[Any, dict[str, Any]]]  # (state, batch) -> (state, metrics)
End = Callable[[Stage, Any], None]  # (stage, params)


class Batches(Iterator, Protocol):
    """An iterator over batches that knows its place, as grain's do."""

    def get_state(self) -> Any:
        """Its place, in plain values."""
        ...

    def set_state(self, state: Any) -> None:
        """Goes to a place."""
        ...


Begin = Callable[[Stage, Any], tuple[State, Step, Batches]]  # (stage, params) -> its first state, step and batches


def train(
    begin: Begin,
    params: Any,
    *,
    settings: Settings,
    model: dict[str, Any],
    output: pathlib.Path,
    tensorboard: bool = True,
    end_stage: End | None = None,
) -> Any:
    """Runs all stages, or what is left of them if `output` holds checkpoints of the same run.

    Args:
      begin: begins a stage; optimizer state is fresh in each, and so are its batches of {"tokens_BT", "document_BT"},
        which are moved to the place of the checkpoint when a run is continued.
      params: master weights to start from; not used when a run is continued.
      settings: the run.
      model: plain values that say which model this is; a run is continued only with the same.
      output: directory for checkpoints, metrics.jsonl, tensorboard/ and plots.
      tensorboard: whether to write its files.
      end_stage: gets the weights each stage ends in. A run killed after it and before its next checkpoint calls again.
    Returns:
      The master weights after the last step.
    Raises:
      ValueError: `output` holds a run with other settings, all of which are named, or the loss is not finite.
    """
    with Checkpoints(output / "checkpoints", settings=settings, model=model) as checkpoints:
        done = checkpoints.latest or 0
        resume, end = checkpoints.latest is not None, 0
        with Progress(output, steps=settings.steps, done=done, tensorboard=tensorboard) as progress:
            for stage in settings.stages:
                first, end = end, end + stage.steps
                if done >= end and end < settings.steps:
                    continue
                state, step, batches = begin(stage, params)
                if resume:
                    state, place = checkpoints.restore(state)
                    batches.set_state(place)
                    resume = False
                for number in range(max(done, first), end):
                    if number % settings.save_every == 0:
                        checkpoints.save(number, state, batches.get_state())
                    batch = next(batches)
                    state, metrics = step(state, batch)
                    metrics = {name: np.asarray(value) for name, value in metrics.items()}
                    _require_finite(metrics, number + 1, stage)
                    tokens = int(np.sum(batch["document_BT"] >= 0))
                    progress.record(number + 1, stage.name, metrics, tokens=tokens)
                params = state.params
                if end_stage is not None:
                    end_stage(stage, params)
            checkpoints.save(settings.steps, state, batches.get_state())
            progress.plot()
    return params


def _require_finite(metrics: dict[str, np.ndarray], step: int, stage: Stage):
    if not np.isfinite(metrics["loss"]):
        raise ValueError(
            f"the loss of step {step} (stage {stage.name!r}) is {metrics['loss']}; the last checkpoint is before it, "
            f"and learning_rate={stage.learning_rate} may be too high"
        )
