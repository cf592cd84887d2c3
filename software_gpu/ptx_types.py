"""Types, address spaces and modifiers of PTX, and the numbers that the interpreter has for them."""

SIZE = {
    "b8": 1,
    "u8": 1,
    "s8": 1,
    "b16": 2,
    "u16": 2,
    "s16": 2,
    "f16": 2,
    "bf16": 2,
    "b32": 4,
    "u32": 4,
    "s32": 4,
    "f32": 4,
    "f16x2": 4,
    "bf16x2": 4,
    "tf32": 4,
    "b64": 8,
    "u64": 8,
    "s64": 8,
    "f64": 8,
    "f32x2": 8,
    "b128": 16,
    "e4m3x2": 2,
    "e5m2x2": 2,
}
CVT_T = {
    "u8": 0,
    "u16": 1,
    "u32": 2,
    "u64": 3,
    "s8": 4,
    "s16": 5,
    "s32": 6,
    "s64": 7,
    "f16": 8,
    "bf16": 9,
    "f32": 10,
    "f64": 11,
    "b8": 0,
    "b16": 1,
    "b32": 2,
    "b64": 3,
}
SPACE = {
    "global": 0,
    "shared": 1,
    "shared::cta": 1,
    "shared::cluster": 2,
    "local": 3,
    "param": 5,
    "const": 5,
    "param::entry": 5,
    "param::func": 3,
}
RND = {"rn": 0, "rz": 1, "rm": 2, "rp": 3, "rni": 0, "rzi": 1, "rmi": 2, "rpi": 3}
ATOM = {
    "add": 0,
    "min": 1,
    "max": 2,
    "and": 3,
    "or": 4,
    "xor": 5,
    "exch": 6,
    "cas": 7,
    "inc": 8,
    "dec": 9,
}
NOP = (
    "fence",
    "membar",
    "setmaxnreg",
    "nanosleep",
    "prefetch",
    "prefetchu",
    "applypriority",
    "discard",
    "brkpt",
    "pmevent",
)


class Unsupported(Exception):
    pass
