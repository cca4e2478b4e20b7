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
