"""Eight virtual CPU devices, strict dtype promotion, and no x64, before jax starts."""

import os
import shutil

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest
from checkpoint_files import PACKED

jax.config.update("jax_numpy_dtype_promotion", "strict")

WHOLE_MODELS = (
    "test_properties.py", "test_golden.py", "test_generate.py", "test_training_forward.py", "test_training_step.py",
    "test_training_gradients.py", "test_finetune.py", "test_draft_stage.py", "test_drafts.py", "test_evaluation.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    """Puts the files that compile whole models first, so that no core waits for one of them at the end."""
    items.sort(key=lambda item: item.path.name not in WHOLE_MODELS)


@pytest.fixture(scope="module")
def quick_compilation():
    """Lets LLVM optimise little, for programs that take far longer to compile than to run; XLA's passes stay."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def copy(tmp_path):
    """A copy of the FP8 and FP4 checkpoint, to edit."""
    return shutil.copytree(PACKED, tmp_path / "copy")
