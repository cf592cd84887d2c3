"""Evaluates printed CuTe layouts: "S<3,4,3> o 0 o ((8,16),(64,1)):((64,512),(1,0))"."""

import ast
import re

import numpy as np


def parse(text):
    m = re.match(r"(?:S<(\d+),(\d+),(\d+)> o 0 o )?(.*):(.*)$", text.strip())
    sw = tuple(map(int, m.groups()[:3])) if m[1] else None
    return sw, ast.literal_eval(m[4]), ast.literal_eval(m[5])


def _flat(shape, stride):
    if isinstance(shape, int):
        return [(shape, stride)]
    return [x for s, d in zip(shape, stride, strict=True) for x in _flat(s, d)]


def mode(shape, stride):
    """Offsets of one mode's elements, first sub-mode fastest."""
    o = np.zeros(1, np.int64)
    for n, d in _flat(shape, stride):
        o = (o[None, :] + d * np.arange(n)[:, None]).reshape(-1)
    return o


def element_offsets(text):
    """(offsets, by the flattened coordinate of each top-level mode; swizzle (b, m, s) or None)"""
    sw, shape, stride = parse(text)
    o = np.zeros((), np.int64)
    for s, d in zip(shape, stride, strict=True):
        o = o[..., None] + mode(s, d)
    return o, sw


def byte_offsets(text, esize, base=0):
    """Absolute shared-memory byte addresses (swizzle is applied to byte addresses)."""
    o, sw = element_offsets(text)
    a = base + o * esize
    if sw:
        b, m, s = sw
        a = a ^ (a >> s & ((1 << b) - 1) << m)
    return a
