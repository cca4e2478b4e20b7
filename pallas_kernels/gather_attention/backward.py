"""Backward pass: recompute the weights of QUERY_BLOCK queries at a time, scatter-add what falls on their rows."""


def gather_attention(static, arrays, cotangent_BTNH):
    """Returns the cotangents of `arrays`; those of packed planes and indices are zeros of no width."""
    raise NotImplementedError
