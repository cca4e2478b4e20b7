"""Rotary positions, with YaRN where a layer has a compressed branch (architecture section 3)."""

import functools
import math

import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantize import reference as kernel
from v41jax.config import Config, RopeScaling


@functools.cache
def frequencies(theta: float, channels: int, scaling: RopeScaling | None) -> np.ndarray:
    """Computes the rotation per position of each channel pair.

    Rounded as the reference does, or positions near 1M move cos and sin by 1e-2: the exponent in float32, the power
    correctly rounded to float32 (through float64), its inverse in float32.

    Args:
      theta: the base.
      channels: R, how many channels rotate; pairs are adjacent.
      scaling: YaRN, or None.
    Returns:
      f32 [R / 2], radians a position.
    """
    exponent = np.arange(0, channels, 2, dtype=np.float32) / np.float32(channels)
    f = np.float32(1) / np.power(theta, exponent.astype(np.float64)).astype(np.float32)
    if scaling is None:
        return f

    def turns_to_pair(turns):
        return (
            channels
            * math.log(scaling.original_max_position_embeddings / (turns * 2 * math.pi))
            / (2 * math.log(theta))
        )

    low = max(math.floor(turns_to_pair(scaling.beta_fast)), 0)
    high = min(math.ceil(turns_to_pair(scaling.beta_slow)), channels - 1)
    pair = np.arange(channels // 2, dtype=np.float32)
    ramp = np.clip((pair - np.float32(low)) / np.float32(max(high - low, 1e-3)), 0, 1).astype(np.float32)
    return (f / np.float32(scaling.factor) * ramp + f * (1 - ramp)).astype(np.float32)


def layer_frequencies(cfg: Config, *, compressed: bool) -> np.ndarray:
    """Picks the table of a layer: with a compressed branch (ratio > 0) its own theta and YaRN, else neither."""
    if compressed:
        return frequencies(cfg.compress_rope_theta, cfg.qk_rope_head_dim, cfg.rope_scaling)
    return frequencies(cfg.rope_theta, cfg.qk_rope_head_dim, None)


def rotate(x, position, frequency: np.ndarray, *, inverse: bool = False):
    """Rotates adjacent pairs of the last R channels by position x frequency.

    Args:
      x: float [..., K], rotated in float32 and returned in its own dtype.
      position: i32, broadcastable to x.shape[:-1], in tokens.
      frequency: f32 [R / 2] from `frequencies`.
      inverse: rotate back.
    """
    cos, sin = turn(position, frequency)
    return kernel.rotate(x, cos, -sin if inverse else sin)


def turn(position, frequency: np.ndarray):
    """Computes (cos, sin), f32 [..., R / 2], of position x frequency."""
    angle = position.astype(jnp.float32)[..., None] * frequency
    return jnp.cos(angle), jnp.sin(angle)


def unrotate(x, position, frequency: np.ndarray):
    """Undoes `rotate`: the attention output carries its query's rotation."""
    return rotate(x, position, frequency, inverse=True)
