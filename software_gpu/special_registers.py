"""Values of %tid, %ctaid, %laneid and the other special registers of a warp."""

import numpy as np

from .state import SimError


def special_register(machine, name, cta, w, n):
    """The value of a special register in warp w of a CTA, whose cluster has n: a number, or one per
    lane.
    """
    L = machine.L
    lane = np.arange(32, dtype=np.uint32)
    cx, cy, cz = L.cluster or (1, 1, 1)
    base, _, ax = name.partition(".")
    k = "xyz".find(ax) if ax else 0
    t = 32 * w + lane
    if base == "%tid":
        return (t % L.block[0], t // L.block[0] % L.block[1], t // (L.block[0] * L.block[1]))[k]
    r = cta.rank
    lin = cta.ctaid[0] + L.grid[0] * (cta.ctaid[1] + L.grid[1] * cta.ctaid[2])
    d = {
        "%ntid": L.block,
        "%ctaid": cta.ctaid,
        "%nctaid": L.grid,
        "%cluster_ctaid": (r % cx, r // cx % cy, r // (cx * cy)),
        "%cluster_nctaid": (cx, cy, cz),
        "%clusterid": (cta.ctaid[0] // cx, cta.ctaid[1] // cy, cta.ctaid[2] // cz),
        "%nclusterid": (L.grid[0] // cx, L.grid[1] // cy, L.grid[2] // cz),
    }
    if base in d:
        return d[base][k]
    one = np.uint64(1)
    l64 = lane.astype(np.uint64)
    v = {
        "%laneid": lane,
        "%warpid": w,
        "%nwarpid": 64,
        "%smid": lin % machine.sms,
        "%nsmid": machine.sms,
        "%gridid": 1,
        "%cluster_ctarank": r,
        "%cluster_nctarank": n,
        "%is_explicit_cluster": int(n > 1),
        "%lanemask_eq": one << l64,
        "%lanemask_lt": (one << l64) - one,
        "%lanemask_le": (one << (l64 + one)) - one,
        "%lanemask_ge": (~((one << l64) - one)) & np.uint64(0xFFFFFFFF),
        "%lanemask_gt": (~((one << (l64 + one)) - one)) & np.uint64(0xFFFFFFFF),
        "%dynamic_smem_size": L.smem_bytes,
        "%total_smem_size": machine.smem_size,
        "%aggr_smem_size": machine.smem_size,
        "%reserved_smem_offset_begin": 0,
        "%reserved_smem_offset_end": 1024,
        "%reserved_smem_offset_cap": 1024,
    }
    if name in v:
        return v[name]
    if "clock" in name or "globaltimer" in name:
        return 0
    raise SimError(f"special register {name} is not supported")
