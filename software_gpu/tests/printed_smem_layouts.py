"""Prints shared-memory layouts of CuTe: (bytes, is K-major, rows, K, layout)."""

import cutlass
import cutlass.cute as cute
import cutlass.utils.blackwell_helpers as sm100
import cutlass.utils.hopper_helpers as sm90
from cutlass.cute.nvgpu import OperandMajorMode, tcgen05
from cutlass.tensor_utils import LayoutEnum

out = []


@cute.jit
def f():
    for dt, es in ((cutlass.BFloat16, 2), (cutlass.Float32, 4)):
        for major in (LayoutEnum.ROW_MAJOR, LayoutEnum.COL_MAJOR):
            for mnk in ((128, 128, 64), (64, 192, 128), (64, 64, 32), (128, 96, 16)):
                out.append(
                    (
                        es,
                        major == LayoutEnum.ROW_MAJOR,
                        mnk[0],
                        mnk[2],
                        str(sm90.make_smem_layout_a(major, mnk, dt, 2)),
                    )
                )
                out.append(
                    (
                        es,
                        major == LayoutEnum.ROW_MAJOR,
                        mnk[1],
                        mnk[2],
                        str(sm90.make_smem_layout_b(major, mnk, dt, 2)),
                    )
                )
        if es == 2:
            for am in (OperandMajorMode.K, OperandMajorMode.MN):
                for g, mn in (
                    (tcgen05.CtaGroup.ONE, (128, 128)),
                    (tcgen05.CtaGroup.ONE, (64, 96)),
                    (tcgen05.CtaGroup.TWO, (256, 128)),
                    (tcgen05.CtaGroup.TWO, (128, 64)),
                ):
                    for K in (16, 32, 64, 128):
                        n = 2 if g == tcgen05.CtaGroup.TWO else 1
                        mma = sm100.make_trivial_tiled_mma(dt, dt, am, am, cutlass.Float32, g, mn)
                        out.append(
                            (
                                es,
                                am == OperandMajorMode.K,
                                mn[0] // n,
                                K,
                                str(sm100.make_smem_layout_a(mma, (*mn, K), dt, 2)),
                            )
                        )
                        out.append(
                            (
                                es,
                                am == OperandMajorMode.K,
                                mn[1] // n,
                                K,
                                str(sm100.make_smem_layout_b(mma, (*mn, K), dt, 2)),
                            )
                        )


cute.compile(f)
for o in out:
    print(repr(o))
