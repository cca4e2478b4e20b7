"""Reads what a function would compute: every equation of its jaxpr, inner ones too."""

import jax
from jax.extend import core


def equations(fn, *args):
    """Traces fn(*args) and lists its equations."""
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr))


def _walk(jaxpr):
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from _walk(inner)


def result_shapes(fn, *args):
    """The shapes of all intermediate results."""
    return {v.aval.shape for equation in equations(fn, *args) for v in equation.outvars}


def indexed_axes(equation):
    """How many axes of its operand a gather or scatter addresses by numbers of their own, batch axes among them."""
    assert equation.invars[1].aval.dtype == "int32", equation
    batch = equation.params["dimension_numbers"].operand_batching_dims
    return len(batch) + equation.invars[1].aval.shape[-1]
