"""Products accumulated in float32, whose gradients are products in the operands' own precision."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

HIGHEST = lax.Precision.HIGHEST  # else GPUs round float32 operands to TF32 and TPUs to bfloat16
EXACT = {"precision": HIGHEST, "preferred_element_type": jnp.float32}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contract(subscripts: str, a, b):
    """Contracts two arrays of one dtype to float32.

    The cotangent is rounded to their dtype first: JAX's own rule multiplies a float32 cotangent by bfloat16 operands,
    which tensor cores do not.

    Args:
      subscripts: as of einsum, "ab,cb->ac": every letter stands twice in all.
    """
    return _einsum(subscripts, a, b)


def _einsum(subscripts: str, a, b):
    return jnp.einsum(subscripts, a, b, **EXACT)


def _forward(subscripts: str, a, b):
    return _einsum(subscripts, a, b), (a, b)


def _backward(subscripts: str, operands, cotangent):
    a, b = operands
    inputs, out = subscripts.split("->")
    left, right = inputs.split(",")
    d_a = _einsum(f"{out},{right}->{left}", cotangent.astype(b.dtype), b)
    d_b = _einsum(f"{out},{left}->{right}", cotangent.astype(a.dtype), a)
    return d_a.astype(a.dtype), d_b.astype(b.dtype)


contract.defvjp(_forward, _backward)
