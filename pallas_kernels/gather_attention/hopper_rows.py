"""How a warpgroup reads packed rows and writes them as bf16 to shared memory, swizzled as wgmma reads them.

Four lanes work on one row, 16 bytes of codes at a time; a row that is missing loads nothing and becomes zeros.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels import ptx
from pallas_kernels.lanes import WARPGROUP
from pallas_kernels.ptx import asm, const, int_type

HEADS, CHANNELS, CHUNK = 64, 512, 64
QUARTER = CHANNELS // 4  # of the channels: the widest accumulator that fits the registers of four warpgroups
ROW_SET = WARPGROUP // 4  # rows that the lanes work on at once
PIECES, LOAD_BYTES = 4, 256  # times 16 bytes that a lane loads at once, of so much of a row
LOADED = 5 * PIECES + 1  # registers of a lane: codes and a pair of scales for each piece, then the bias
TILE_BYTES, TILES_WIDE, QUARTER_BYTES = 1024, 2, CHUNK * QUARTER * 2  # a tile: 8 rows x 64 channels of bf16
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
SCALAR = plgpu.Layout.WG_SPLAT(())
LOAD_LAYOUT = plgpu.Layout.WG_STRIDED((LOADED * WARPGROUP,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a lane reads and expands a row's bytes."""

    code_bytes: int  # of a row
    scale_bytes: int  # of a row
    stores: int  # of 8 channels, that 16 bytes of codes expand to

    @property
    def loads(self) -> int:
        """Of one lane, for one chunk."""
        return CHUNK // ROW_SET * self.code_bytes // LOAD_BYTES


PACKINGS = {"fp8_e8m0_32": Packing(512, 16, 2), "fp4_e4m3_16": Packing(256, 32, 4)}


def _lane():
    """Row (of the 8 a warp works on), place among the lanes of that row, warp; so stores meet no bank twice."""
    thread = mgpu.thread_idx()
    row, place, warp = (
        arith.andi(arith.shrui(thread, const(shift)), const(mask)) for shift, mask in ((0, 7), (3, 3), (5, 3))
    )
    return row, place, warp


def load_rows(planes, packing, number):
    """Returns a function of (codes, scales, index, sequence, query, chunk): the bytes of one of a lane's loads."""
    entries, width = planes[0].shape[1], planes[2].shape[1]
    row_set, part = divmod(number, packing.code_bytes // LOAD_BYTES)
    scale_stride = packing.scale_bytes * LOAD_BYTES // packing.code_bytes // PIECES
    lane_scale = 2 if scale_stride == 8 else 0  # a lane's pair of scales is its own, or one for the row's four lanes
    result = plgpu.ShapeDtypeStruct((LOADED * WARPGROUP,), jnp.int32, layout=LOAD_LAYOUT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3 + (SCALAR,) * 3, return_type=result)
    def load(ctx, codes, scales, index, sequence, query, chunk):
        del ctx
        i64 = int_type(64)
        codes, scales, index = (ptx.address(ref) for ref in (codes, scales, index))
        sequence, query, chunk = (scalar.registers.item() for scalar in (sequence, query, chunk))

        def address(base, major, size, minor, bytes, place, lane_bytes):
            flat = arith.addi(arith.muli(arith.extsi(i64, major), const(size, 64)), arith.extsi(i64, minor))
            lane = arith.extsi(i64, arith.muli(place, const(lane_bytes)))
            return arith.addi(arith.addi(base, arith.muli(flat, const(bytes, 64))), lane)

        lane_row, place, warp = _lane()
        row = arith.addi(arith.muli(chunk, const(CHUNK)), arith.muli(warp, const(8)))
        row = arith.addi(arith.addi(row, lane_row), const(row_set * ROW_SET))
        [entry] = asm(
            f".reg .pred p; .reg .b32 t; setp.lt.s32 p, $2, {width}; mov.b32 t, -1;"
            " @p ld.global.nc.b32 t, [$1]; mov.b32 $0, t;",
            "r", address(index, query, width, row, 4, place, 0), row,
        )  # fmt: skip
        entry = arith.minsi(entry, const(entries - 1))
        codes = address(codes, sequence, entries, entry, packing.code_bytes, place, 16)
        scales = address(scales, sequence, entries, entry, packing.scale_bytes, place, lane_scale)
        loaded = []
        for piece in range(part * PIECES, (part + 1) * PIECES):
            loaded += asm(
                ".reg .pred p; .reg .b32 t<4>; setp.ge.s32 p, $5, 0;"
                " mov.b32 t0, 0; mov.b32 t1, 0; mov.b32 t2, 0; mov.b32 t3, 0;"
                f" @p ld.global.nc.L1::no_allocate.v4.b32 {{t0, t1, t2, t3}}, [$4 + {piece * 64}];"
                " mov.b32 $0, t0; mov.b32 $1, t1; mov.b32 $2, t2; mov.b32 $3, t3;",
                "rrrr", codes, entry,
            )  # fmt: skip
            loaded += asm(
                ".reg .pred p; .reg .b16 t; setp.ge.s32 p, $2, 0; mov.b16 t, 0;"
                f" @p ld.global.nc.b16 t, [$1 + {piece * scale_stride}]; cvt.u32.u16 $0, t;",
                "r", scales, entry,
            )  # fmt: skip
        missing = arith.cmpi(arith.CmpIPredicate.slt, entry, const(0))
        loaded.append(arith.select(missing, const(0xFF800000), const(0)))  # bits of -inf
        vec = ir.VectorType.get((1,), int_type())
        loaded = np.array([vector.broadcast(vec, register) for register in loaded], dtype=object)
        return mgpu.FragmentedArray(_registers=loaded, _layout=LOAD_LAYOUT.to_mgpu(), _is_signed=True)

    return load


def expand_rows(packing, number):
    """Returns a function of (rows, bias, loaded, slot) that writes what a lane loaded as bf16, and its row's bias."""
    row_set, part = divmod(number, packing.code_bytes // LOAD_BYTES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(SWIZZLED), plgpu.RefType(), LOAD_LAYOUT, SCALAR))
    def expand(ctx, rows, bias, loaded, slot):
        del ctx
        rows, bias = ptx.address(rows), ptx.address(bias)
        loaded = iter(vector.extract(register, [], [0]) for register in loaded.registers.flat)
        slot = slot.registers.item()

        def at(base, *terms):
            for term, factor in terms:
                base = arith.addi(base, arith.muli(term, const(factor)))
            return base

        lane_row, place, warp = _lane()
        octet = arith.addi(warp, const(row_set * ROW_SET // 8))
        unit = arith.muli(place, const(packing.stores))  # of 8 channels: the lane's first of a piece
        tile, unit = arith.shrui(unit, const(3)), arith.xori(arith.andi(unit, const(7)), lane_row)
        base = at(
            rows, (slot, 4 * QUARTER_BYTES), (octet, TILES_WIDE * TILE_BYTES), (tile, TILE_BYTES), (lane_row, 128)
        )
        swizzled = [at(base, (arith.xori(unit, const(store)), 16)) for store in range(packing.stores)]
        for piece in range(part * PIECES, (part + 1) * PIECES):
            words = [next(loaded) for _ in range(4)]
            quarter, tile = divmod(piece * packing.stores // 2, TILES_WIDE)
            _STORES[packing](words, next(loaded), place, swizzled, quarter * QUARTER_BYTES + tile * TILE_BYTES)
        asm(
            ".reg .pred p; setp.eq.s32 p, $2, 0; @p st.shared.b32 [$0], $1;",
            "", at(bias, (slot, 4 * CHUNK), (octet, 4 * 8), (lane_row, 4)), next(loaded), place,
        )  # fmt: skip

    return expand


def _store_fp4(words, scales, place, addresses, offset):
    """Stores 32 channels: E2M1 in the bits of bfloat16s that lack 2^126, times that and one E4M3 scale for each 16."""
    del place
    scales = asm(
        ".reg .b16 t, u; .reg .b32 x; .reg .f32 f, g; cvt.u16.u32 t, $2; cvt.rn.f16x2.e4m3x2 x, t; mov.b32 {t, u}, x;"
        " cvt.f32.f16 f, t; cvt.f32.f16 g, u; mul.f32 f, f, 0f7A800000; mul.f32 g, g, 0f7A800000;"  # 2^118
        " cvt.rn.bf16x2.f32 $0, f, f; cvt.rn.bf16x2.f32 $1, g, g;",
        "rr", scales,
    )  # fmt: skip
    # A multiplication copies a code so that its sign and its magnitude fall into place: n and n + 4 of the eight codes.
    four = """
        and.b32 x, {source}, 0x000F000F; mul.lo.u32 x, x, 0x1040; and.b32 x, x, 0x81C081C0;
        and.b32 y, {source}, 0x00F000F0; mul.lo.u32 y, y, 0x0104; and.b32 y, y, 0x81C081C0;
        prmt.b32 {low}, x, y, 0x5410; prmt.b32 {high}, x, y, 0x7632;"""
    scale = "".join(f" mul.bf16x2 {pair}, {pair}, $2; mul.bf16x2 {pair}, {pair}, rest;" for pair in "abcd")
    for i, (word, address) in enumerate(zip(words, addresses, strict=True)):
        asm(
            ".reg .b32 shifted, rest, x, y, a, b, c, d; shr.u32 shifted, $1, 8; mov.b32 rest, 0x43804380;"  # 2^8
            + four.format(source="$1", low="a", high="c")
            + four.format(source="shifted", low="b", high="d")
            + scale
            + f"st.shared.v4.b32 [$0 + {offset}], {{a, b, c, d}};",
            "", address, word, scales[i // 2],
        )  # fmt: skip


def _store_fp8(words, scales, place, addresses, offset):
    """Stores 16 channels: E4M3 times one E8M0 scale; a piece is half a group, so lanes 2 and 3 take the second byte."""
    [scale] = asm(
        ".reg .pred p; .reg .b32 b, s; shl.b32 s, $2, 2; and.b32 s, s, 8; shr.u32 b, $1, s; and.b32 b, b, 255;"
        " shl.b32 s, b, 23; setp.eq.u32 p, b, 0; selp.b32 s, 0x400000, s, p;"
        " setp.eq.u32 p, b, 255; selp.b32 $0, 0x7FC00000, s, p;",
        "r", scales, place,
    )  # fmt: skip
    # Halves of a word by a shift: as a pair of registers, the high half of a word that ptxas knows to be 0 became NaN.
    two = """
        cvt.rn.f16x2.e4m3x2 x, {0}; mov.b32 {{t, u}}, x; cvt.f32.f16 f, t; cvt.f32.f16 g, u;
        mul.f32 f, f, scale; mul.f32 g, g, scale; cvt.rn.bf16x2.f32 {1}, g, f;"""
    for pair, address in zip((words[:2], words[2:]), addresses, strict=True):
        asm(
            ".reg .b16 t, u, p, q, r, s; .reg .b32 x, a, b, c, d; .reg .f32 f, g, scale;"
            "cvt.u16.u32 p, $1; shr.u32 x, $1, 16; cvt.u16.u32 q, x; cvt.u16.u32 r, $2; shr.u32 x, $2, 16;"
            "cvt.u16.u32 s, x; mov.b32 scale, $3;"
            + "".join(two.format(*names) for names in ("pa", "qb", "rc", "sd"))
            + f"st.shared.v4.b32 [$0 + {offset}], {{a, b, c, d}};",
            "", address, *pair, scale,
        )  # fmt: skip


_STORES = {PACKINGS["fp4_e4m3_16"]: _store_fp4, PACKINGS["fp8_e8m0_32"]: _store_fp8}
