"""What a run shows and leaves: a progress bar, metrics.jsonl, TensorBoard files, plots."""

import json
import os
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

METRICS = "metrics.jsonl"


def import_extra(name: str) -> Any:
    """Imports a package of the optional `train` group, or says how to get it."""
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{name} is not installed; pip install 'v41jax[train]'") from error


def device_memory() -> int | None:
    """Peak bytes in use on the fullest local device; None where the platform does not count them."""
    peaks = [stats["peak_bytes_in_use"] for d in jax.local_devices() if (stats := d.memory_stats() or {})]
    return max(peaks, default=None)


class Progress:
    """Records one mapping of scalars and vectors a step; a context manager."""

    def __init__(self, directory: pathlib.Path, *, steps: int, done: int = 0, tensorboard: bool = True):
        """Opens the files in `directory`; what they say of steps after `done` is dropped, as those are run again."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._done = directory, done
        self.history = [record for record in read_metrics(directory) if record["step"] <= done]
        partial = directory / f".{METRICS}.partial"
        partial.write_text("".join(json.dumps(record) + "\n" for record in self.history))
        os.replace(partial, directory / METRICS)
        self._file = (directory / METRICS).open("a")
        self._board = None
        if tensorboard:
            writer = import_extra("tensorboardX").SummaryWriter
            self._board = writer(str(directory / "tensorboard"), purge_step=done + 1)
        self._bar = tqdm(total=steps, initial=done, desc="train", unit="step", disable=None)
        self._last = time.perf_counter()

    def __enter__(self) -> "Progress":
        """Returns itself."""
        return self

    def __exit__(self, *_) -> None:
        """Closes the files."""
        self._bar.close()
        self._file.close()
        if self._board is not None:
            self._board.close()

    def record(self, step: int, stage: str, metrics: Mapping[str, Any], *, tokens: int) -> None:
        """Writes one step.

        Args:
          step: steps done, this one included.
          stage: its name.
          metrics: arrays of the step, fetched here: scalars, or vectors such as the load of every expert.
          tokens: tokens of the batch, for the rate.
        """
        values = {name: np.asarray(value, np.float64).tolist() for name, value in metrics.items()}
        now = time.perf_counter()
        values |= {"tokens_per_second": tokens / (now - self._last), "memory_bytes": device_memory()}
        self._last = now
        record = {"step": step, "stage": stage, **values}
        self.history.append(record)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float)}
        if self._board is not None:
            for name, value in scalars.items():
                self._board.add_scalar(name, value, step)
        shown = {name: f"{scalars[name]:.3f}" for name in ("loss", "kl", "accepted") if name in scalars}
        shown["tokens/s"] = f"{values['tokens_per_second']:.0f}"
        if values["memory_bytes"] is not None:
            shown["memory"] = f"{values['memory_bytes'] / 2**30:.1f} GiB"
        self._bar.set_postfix({"stage": stage, **shown}, refresh=False)
        self._bar.update(1)

    def plot(self) -> list[pathlib.Path]:
        """Draws loss, KL, accepted drafts and the last expert load as PNG files; returns those it had figures for."""
        return plot_metrics(self.history, self._directory)


def read_metrics(directory: pathlib.Path) -> list[dict[str, Any]]:
    """Reads metrics.jsonl; a last line cut off by a kill is left out."""
    path = directory / METRICS
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def plot_metrics(history: Sequence[Mapping[str, Any]], directory: pathlib.Path) -> list[pathlib.Path]:
    """Draws what `history` has of "loss", "kl", "accepted" over steps and "expert_load", the last one, in bars."""
    figure_type = import_extra("matplotlib.figure").Figure  # without pyplot: no window system is asked for
    paths = []
    for name in ("loss", "kl", "accepted", "expert_load"):
        points = [(record["step"], record[name]) for record in history if name in record]
        if not points:
            continue
        figure = figure_type(figsize=(6, 4), layout="constrained")
        axes = figure.subplots()
        if name == "expert_load":
            load = np.asarray(points[-1][1]).ravel()
            axes.bar(range(load.size), load)
            axes.set(xlabel="expert", ylabel="share of routed tokens", title=f"step {points[-1][0]}")
        else:
            axes.plot(*zip(*points, strict=True))
            axes.set(xlabel="step", ylabel=name)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths
