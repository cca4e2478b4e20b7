"""What the kernel benchmark times, where no GPU is needed to tell."""

import jax.numpy as jnp
from programs import load_script


def test_plain_jax_stays_plain_outside_its_default(monkeypatch):
    benchmark, traced = load_script("benchmark"), []
    monkeypatch.setattr(benchmark, "FLUSH", 8)

    def fn(x):
        traced.append(x)
        return 2 * x

    compiled, _ = benchmark.compile_ahead(fn, (jnp.arange(3),), "reference")
    _, out = compiled(jnp.zeros(8, jnp.uint8), jnp.arange(3))
    assert out.tolist() == [0, 2, 4]
    assert len(traced) == 1  # tracing again, outside, would have compiled the platform's kernel
