"""Reads what a function would compute on a platform: every equation of its jaxpr, inner ones too."""

import jax
from jax.extend import core

from pallas_kernels import dispatch


def equations(fn, *args, platform="cpu"):
    """Traces fn(*args) and lists its equations, those of the backends that serve `platform` among them."""
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr, platform))


def _walk(jaxpr, platform):
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive is dispatch.run_p:
            avals = [v.aval for v in equation.invars]
            inner = [jax.make_jaxpr(dispatch.serving(platform, avals, **equation.params))(*avals).jaxpr]
        else:
            inner = core.jaxprs_in_params(equation.params)
        for each in inner:
            yield from _walk(each, platform)


def result_shapes(fn, *args, platform="cpu"):
    """The shapes of all intermediate results."""
    avals = [v.aval for equation in equations(fn, *args, platform=platform) for v in equation.outvars]
    return {aval.shape for aval in avals if hasattr(aval, "shape")}  # tokens have none


def indexed_axes(equation):
    """How many axes of its operand a gather or scatter addresses by numbers of their own, batch axes among them."""
    assert equation.invars[1].aval.dtype == "int32", equation
    batch = equation.params["dimension_numbers"].operand_batching_dims
    return len(batch) + equation.invars[1].aval.shape[-1]
