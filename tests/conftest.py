"""Eight virtual CPU devices, strict dtype promotion, and no x64, before jax starts."""

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

WHOLE_MODELS = "test_properties.py", "test_golden.py", "test_generate.py"


def pytest_collection_modifyitems(items):
    """Puts the files that compile whole models first, so that no core waits for one of them at the end."""
    items.sort(key=lambda item: item.path.name not in WHOLE_MODELS)
