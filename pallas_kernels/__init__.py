"""Operations that make the model fast. A leaf: arrays and static numbers in, arrays out; it knows no model.

One folder an operation: `__init__.py` is the contract, `reference.py` the plain JAX that defines it.
Shape suffixes are those of `v41jax`.
"""
