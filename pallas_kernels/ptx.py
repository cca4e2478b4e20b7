"""Instructions that Pallas has no name for, inlined as PTX: what the Mosaic GPU kernels share to write them."""

from jax.experimental.mosaic.gpu import utils
from jax.experimental.mosaic.gpu.utils import llvm
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def int_type(bits: int = 32):
    """The integer type of so many bits."""
    return ir.IntegerType.get_signless(bits)


def const(value: int, bits: int = 32):
    """A constant integer, from its signed or unsigned value."""
    value &= (1 << bits) - 1
    return utils.c(value - (value >> (bits - 1) << bits), int_type(bits))


def address(ref):
    """The address of a reference: i32 in shared memory, i64 in device memory."""
    shared = utils.is_smem_ref(ir.MemRefType(ref.type))
    return llvm.ptrtoint(int_type(32 if shared else 64), utils.memref_ptr(ref))


def space(at) -> str:
    """PTX's name of the memory that an address from `address` lies in."""
    return "shared" if at.type == int_type(32) else "global"


def asm(text: str, results: str, *operands, pure: bool = False):
    """Inlines PTX.

    Args:
      text: the instructions; $0 ... are the results, then the operands. A result may be written only after the last
        operand was read.
      results: the kind of each, "r" for an i32 and "f" for an f32.
      operands: integers of 32 or 64 bits, or f32.
      pure: touches no memory, so that the compiler may move or drop it; otherwise the order of the program holds.
    Returns:
      the results as a list.
    """
    kinds = {int_type(32): "r", int_type(64): "l", ir.F32Type.get(): "f"}
    types = [int_type(32) if kind == "r" else ir.F32Type.get() for kind in results]
    constraints = [f"={kind}" for kind in results] + [kinds[operand.type] for operand in operands]
    out = {0: ir.Type.parse("!llvm.void"), 1: types[0] if types else None}.get(len(types))
    out = llvm.StructType.get_literal(types) if out is None else out
    constraints = ",".join(constraints if pure else [*constraints, "~{memory}"])
    value = llvm.inline_asm(out, list(operands), f"{{ {text} }}", constraints, has_side_effects=not pure)
    if len(types) < 2:
        return [value] if types else []
    return [llvm.extractvalue(type, value, [i]) for i, type in enumerate(types)]


def add(*terms):
    """Sum of integers of one type."""
    total, *rest = terms
    for term in rest:
        total = arith.addi(total, term)
    return total
