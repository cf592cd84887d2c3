"""Codes of float8_e4m3fn as numbers in 16 bits."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

# in a word
CODES = 4


def numbers_of(
    word: Int32, scale: Float32 | None, dtype: type[cutlass.Numeric]
) -> tuple[Int32, Int32]:
    """Four codes as numbers in 16 bits, in two words: times the scale in fp32, rounded once.
    Written as PTX, for which the language has no name. Codes are exact in fp16, NaN stays NaN."""
    text = (
        "{ .reg .b16 c0, c1; .reg .b32 a, b; mov.b32 {c0, c1}, {$r0}; "
        "cvt.rn.f16x2.e4m3x2 a, c0; cvt.rn.f16x2.e4m3x2 b, c1; "
    )
    if scale is None and dtype is cutlass.Float16:
        text += "mov.b32 {$w0}, a; mov.b32 {$w1}, b; }"
    else:
        name = "bf16x2" if dtype is cutlass.BFloat16 else "f16x2"
        text += ".reg .b16 h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3; "
        text += "mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b; "
        text += "".join(f"cvt.f32.f16 f{i}, h{i}; " for i in range(CODES))
        if scale is not None:
            text += "".join(f"mul.rn.f32 f{i}, f{i}, {{$r1}}; " for i in range(CODES))
        text += f"cvt.rn.{name}.f32 {{$w0}}, f1, f0; cvt.rn.{name}.f32 {{$w1}}, f3, f2; }}"
    arguments = [word] if scale is None else [word, scale]
    return cute.arch.inline_ptx(text, write_only_types=[Int32, Int32], read_only_args=arguments)
