"""Checkpoints of a run, by Orbax in the background: train state, place in the data, settings.

A save is written beside its name and renamed when complete, so a process killed at any moment leaves the last complete
one; resuming repeats the steps since. On the same devices a resumed run equals an uninterrupted one bit for bit.
"""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from v41jax.training.optimizer import path_name
from v41jax.training.settings import Settings, difference, to_dict


class Checkpoints:
    """The checkpoints of one run directory; a context manager that waits for the last save."""

    def __init__(self, directory: str | pathlib.Path, *, settings: Settings, model: dict[str, Any]):
        """Opens `directory`, made if missing. `settings` and `model`, plain values, must be those it was begun with."""
        self._now = json.loads(json.dumps({**to_dict(settings), "model": model}))
        self._manager = ocp.CheckpointManager(
            pathlib.Path(directory).absolute(),
            options=ocp.CheckpointManagerOptions(max_to_keep=settings.keep, enable_async_checkpointing=True),
        )

    def __enter__(self) -> "Checkpoints":
        """Returns itself."""
        return self

    def __exit__(self, *_) -> None:
        """Waits for the last save to be on disk."""
        self._manager.close()

    @property
    def latest(self) -> int | None:
        """Steps done at the last complete checkpoint; None where there is none."""
        return self._manager.latest_step()

    def save(self, step: int, state: Any, data: dict[str, Any]) -> None:
        """Copies the state off the devices and returns; writing goes on in the background.

        Args:
          step: steps done.
          state: a pytree of arrays, random keys among them.
          data: the data iterator's `get_state()`.
        """
        if step == self.latest:
            return
        arrays = ocp.args.PyTreeSave(_named(state))
        about = ocp.args.JsonSave({"settings": self._now, "data": data})
        self._manager.save(step, args=ocp.args.Composite(state=arrays, about=about))

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]]:
        """Restores the latest checkpoint.

        Args:
          like: a state of the same structure; its arrays give shapes, dtypes and shardings, not values.
        Returns:
          The state and the data iterator's.
        Raises:
          ValueError that names every setting in which the saved run differs from this one.
        """
        step = self.latest
        if step is None:
            raise ValueError(f"{self._manager.directory} holds no complete checkpoint to resume from")
        about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
        differences = difference(about["settings"], self._now)
        if differences:
            raise ValueError(
                f"{self._manager.directory} was begun with other settings: {'; '.join(differences)}. "
                "Resume with the same, or choose another output directory"
            )
        target = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in _named(like).items()
        }
        arguments = ocp.args.PyTreeRestore(target, restore_args=ocp.checkpoint_utils.construct_restore_args(target))
        arrays = self._manager.restore(step, args=ocp.args.Composite(state=arguments))["state"]
        leaves, structure = jax.tree.flatten(like)
        restored = [
            jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if _is_key(leaf) else array
            for leaf, array in zip(leaves, (arrays[name] for name in _named(like)), strict=True)
        ]
        return jax.tree.unflatten(structure, restored), about["data"]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _named(state: Any) -> dict[str, jax.Array]:
    """Names every array; random keys as the integers they hold."""
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {path_name(path): jax.random.key_data(leaf) if _is_key(leaf) else jnp.asarray(leaf) for path, leaf in leaves}
