"""The checkpoint that ships with the package: the released layout in FP8 and FP4, a few hundred thousand weights."""

import pathlib

BUILT_IN = pathlib.Path(__file__).parent / "tiny-fp8fp4"
