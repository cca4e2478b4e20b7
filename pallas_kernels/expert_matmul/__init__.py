"""Grouped matmul: tiles of rows, each times the packed weights of one expert."""

from pallas_kernels import dispatch
from pallas_kernels.expert_matmul import mosaic_gpu, mosaic_tpu, reference

BACKENDS = {
    "reference": reference.expert_matmul,
    "mosaic_gpu": mosaic_gpu.expert_matmul,
    "mosaic_tpu": mosaic_tpu.expert_matmul,
}


def expert_matmul(x_MRD, codes_EFD, scales_EFG, expert_M, *, format: str | None, implementation: str | None = None):
    """Multiplies each tile of rows by its expert's weights, dequantised on the way: x @ W[expert]^T.

    Args:
      x_MRD: float, M tiles of R rows, already rounded as the activation format wants.
      codes_EFD, scales_EFG: uint8 planes of E experts' weights [E, F, D]; a dense weight is one expert, a batch one
        tile.
      expert_M: i32 expert of each tile; -1: the tile is empty and no weight is read for it. None: tile m is expert m's,
        and M = E.
      format: "fp4_e8m0_32" or "fp8_e8m0_32x32"; None: the codes are float weights and the scales are not read.
      implementation: a key of BACKENDS that must run or raise; None picks by platform.
    Returns:
      f32 [M, R, F], accumulated in float32; zeros for an empty tile. Differentiable in x, and in float weights.
    """
    if expert_M is None and x_MRD.shape[0] != codes_EFD.shape[0]:
        raise ValueError(
            f"{x_MRD.shape[0]} tiles for {codes_EFD.shape[0]} experts; give expert_M where these numbers differ"
        )
    return dispatch.run(
        "expert_matmul", BACKENDS, implementation, x_MRD, codes_EFD, scales_EFG, expert_M, format=format
    )
