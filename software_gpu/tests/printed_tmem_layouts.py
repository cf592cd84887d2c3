"""Prints where CuTe puts the registers of tcgen05.ld and tcgen05.st."""

import cutlass
import cutlass.cute as cute
from cutlass.cute.nvgpu import tcgen05

out = []


@cute.jit
def f():
    for nm in ("32x32b", "16x64b", "16x128b", "16x256b", "16x32bx2"):
        for n in (1, 2, 4, 8, 16):
            rep = getattr(tcgen05.Repetition, f"x{n}")
            for kind in ("Ld", "St"):
                a = cute.make_copy_atom(getattr(tcgen05, kind + nm + "Op")(rep), cutlass.Float32)
                out.append((nm, n, kind, str(a.layout_dst_tv if kind == "Ld" else a.layout_src_tv)))


cute.compile(f)
for o in out:
    print(repr(o))
