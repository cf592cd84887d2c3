"""Kernels and the sizes of their parameters, read from a cubin or from PTX."""

from __future__ import annotations

import ctypes
import re
import struct

from .ptx_types import SIZE


def param_sizes_from_ptx(ptx: str) -> dict[str, list[int]]:
    """{entry name: [bytes of each parameter]} of a PTX text."""
    out = {}
    for m in re.finditer(r"\.entry\s+([\w$]+)\s*(\((.*?)\))?\s*(?=[.{])", ptx, re.S):
        sizes = []
        for p in re.finditer(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s*(?:\.ptr[^%\w]*(?:\.\w+\s*)*(?:\.align\s+\d+\s*)?)?\s*([\w$]+)\s*(?:\[(\d+)\])?",
            m[3] or "",
        ):
            sizes.append(SIZE[p[1]] * int(p[3] or 1))
        out[m[1]] = sizes
    return out


def parse_cubin(addr: int) -> dict:
    """Copy an ELF image out of memory and read its kernels and their parameter sizes
    (.nv.info.<kernel>).
    """
    head = ctypes.string_at(addr, 64)
    if (
        head[:4] == b"\x50\xed\x55\xba"
    ):  # fat binary: entries {u16 kind, u16, u32 header bytes, u64 payload bytes}
        hsize, total = struct.unpack_from("<HQ", head, 6)[0], struct.unpack_from("<Q", head, 8)[0]
        pos, end = addr + hsize, addr + hsize + total
        while pos < end:
            kind, _, eh, size = struct.unpack("<HHIQ", ctypes.string_at(pos, 16))
            if kind == 2 and ctypes.string_at(pos + eh, 4) == b"\x7fELF":
                return parse_cubin(pos + eh)
            pos += eh + size
    if head[:4] != b"\x7fELF":
        raise ValueError("no cubin in the image (compressed, or not an ELF)")
    (shoff,) = struct.unpack_from("<Q", head, 0x28)
    (phoff,) = struct.unpack_from("<Q", head, 0x20)
    phent, phnum, shent, shnum, shstr = struct.unpack_from("<HHHHH", head, 0x36)
    sh = ctypes.string_at(addr + shoff, shent * shnum)
    secs = [struct.unpack_from("<IIQQQQIIQQ", sh, i * shent) for i in range(shnum)]
    end = max(
        [shoff + shent * shnum, phoff + phent * phnum] + [s[4] + s[5] for s in secs if s[1] != 8]
    )
    img = ctypes.string_at(addr, end)
    names = img[secs[shstr][4] :]
    kernels = {}
    for s in secs:
        nm = names[s[0] : names.index(b"\0", s[0])].decode()
        if nm.startswith(".nv.info."):
            data, pos, params = img[s[4] : s[4] + s[5]], 0, {}
            while pos + 4 <= len(data):
                fmt, attr, val = (
                    data[pos],
                    data[pos + 1],
                    struct.unpack_from("<H", data, pos + 2)[0],
                )
                pos += 4
                if fmt == 4:
                    if attr == 0x17 and val >= 12:
                        _, ordinal, off, word = struct.unpack_from("<IHHI", data, pos)
                        params[ordinal] = (off, word >> 18)
                    pos += val
            kernels[nm[9:]] = [params[i] for i in sorted(params)]
        elif nm.startswith(".text."):
            kernels.setdefault(nm[6:], [])
    return {"image": img, "kernels": kernels}
