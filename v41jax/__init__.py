"""DeepSeek-V4.1-Flash in JAX.

Shape suffixes name axes everywhere: B batch, T query tokens, S entries, W window slots, K selected entries, M blocks,
C candidate blocks, G groups a call completes, D model, N heads, H head dim, I index heads, J index head dim,
R low rank, E experts, F expert width, Z streams, V vocabulary.
"""

from v41jax.cache import Cache, bytes_per_token, init_cache, window_bytes
from v41jax.checkpoint import load_checkpoint, restore_orbax, save_checkpoint, save_orbax
from v41jax.config import Config, LayerSpec, Role, layer_plan, tiny, v41_flash
from v41jax.config_json import load_config
from v41jax.inference import decode, forward, prefill, prefill_encoder
from v41jax.model import init_params, parameter_count, specs
from v41jax.release import check_checkpoint

__all__ = [
    "Cache",
    "Config",
    "LayerSpec",
    "Role",
    "bytes_per_token",
    "check_checkpoint",
    "decode",
    "forward",
    "init_cache",
    "init_params",
    "layer_plan",
    "load_checkpoint",
    "load_config",
    "parameter_count",
    "prefill",
    "prefill_encoder",
    "restore_orbax",
    "save_checkpoint",
    "save_orbax",
    "specs",
    "tiny",
    "v41_flash",
    "window_bytes",
]
