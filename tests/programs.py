"""The scripts, run in this process or in one of their own."""

import importlib.util
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts"


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def environment(**more):
    """That of this process, for one of its own that finds the packages even where they are not installed."""
    return os.environ | {"PYTHONPATH": str(ROOT)} | more


def run_script(name, *args, devices=1):
    flags = f"--xla_force_host_platform_device_count={devices}"
    env = environment(PYTHONWARNINGS="error", XLA_FLAGS=flags)
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, args)]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
