"""Handlers of asynchronous copies: cp.async, bulk copies, TMA tiles, st.async and red.async."""

import numpy as np

from . import tma
from .context import Ctx, lanes_of
from .operand_access import address, reader, where_shared
from .operands import Mem, Reg, Vec
from .ptx_types import SIZE


def cp(m, p, ins):
    mods, a = ins.mods, ins.args
    if mods[1] == "async" and "bulk" not in mods and mods[2] in ("ca", "cg"):
        return cp_async(m, p, ins)
    if mods[1] == "async" and mods[2] in ("commit_group", "wait_group", "wait_all"):
        return cp_async_groups(mods[2], ins.args)
    if mods[1] == "async" and mods[2] == "mbarrier":
        ad = address(p, a[0])
        noinc = "noinc" in mods

        def cpmb(W, mask):
            cx = Ctx(m, p, ins, W, mask)
            if noinc:
                places = [where_shared(m, W, ins, ad(W, lane)) for lane in lanes_of(mask)]

                def arrive():
                    for place in places:
                        cx.mbar_arrive(*place)

                W.copies.arrive(m, W, arrive)

        return cpmb
    red = mods[1] == "reduce"
    if "commit_group" in mods:

        def commit(W, mask):
            W.bulk_groups.append(W.bulk)
            W.bulk = []

        return commit
    if "wait_group" in mods:
        n = a[0].value

        def wait(W, mask):
            g = W.bulk_groups
            while len(g) > n:
                for fn in g.pop(0):
                    if fn:
                        fn()

        return wait
    if "prefetch" in mods:
        return lambda W, mask: None
    if "tensor" in mods:
        return tensor(m, p, ins, red)
    return bulk(m, p, ins, red)


def cp_async(m, p, ins):
    a = ins.args
    d, s = address(p, a[0]), address(p, a[1])
    n = a[2].value
    rest = list(a[3:])
    src = None
    if rest and not ("L2::cache_hint" in ins.mods and len(rest) == 1):
        x = rest[0]
        if isinstance(x, Reg) and x.type == "pred":
            i = p.pred(x)

            def src(W, lane):
                return 0 if ((int(W.P[i]) >> lane) & 1) ^ int(x.neg) else n
        else:
            src = reader(p, x, 4)

    def run(W, mask):
        moves = []
        for lane in lanes_of(mask):
            cta, off = where_shared(m, W, ins, d(W, lane))
            k = min(src(W, lane), n) if src else n
            if off % n:
                m.fail(W, ins, "misaligned cp.async destination")
            moves.append((cta, off, k, s(W, lane)))

        def go():
            for cta, off, k, begin in moves:
                if k:
                    cta.smem[off : off + k] = m.mem(begin, k, W, ins)
                cta.smem[off + k : off + n] = 0
                cta.shadow[off : off + n] = W.c.tag  # cp.async is generic proxy
                W.c.dlo, W.c.dhi = min(W.c.dlo, off), max(W.c.dhi, off + n)

        W.copies.start(m, go, [(cta, off, n) for cta, off, _, _ in moves])

    return run


def cp_async_groups(what, args):
    """cp.async.commit_group, .wait_group and .wait_all"""
    if what == "commit_group":
        return lambda W, mask: W.copies.commit()
    left = args[0].value if what == "wait_group" else None
    return lambda W, mask: W.copies.wait(left)


def bulk(m, p, ins, red):
    """non-tensor bulk copies and reductions"""
    mods, a = ins.mods, ins.args
    i0 = mods.index("bulk")
    spaces = [x for x in mods[i0 + 1 :] if x in ("global", "shared::cta", "shared::cluster")]
    if len(spaces) < 2:
        return None
    dst, src = spaces[0], spaces[1]
    d, s, n = address(p, a[0]), address(p, a[1]), reader(p, a[2], 4)
    if "cp_mask" in mods:
        return None
    mb = address(p, a[3]) if "mbarrier::complete_tx::bytes" in mods else None
    mcast = reader(p, a[4], 2) if "multicast::cluster" in mods else None
    op = ty = None
    if red:
        ty = mods[-1]
        op = next(x for x in mods if x in ("add", "min", "max", "and", "or", "xor", "inc", "dec"))

    def run(W, mask):

        cx = Ctx(m, p, ins, W, mask)
        for lane in lanes_of(mask):
            da, sa, nb = d(W, lane), s(W, lane), n(W, lane)
            if nb % 16 or da % 16 or sa % 16:
                m.fail(
                    W, ins, f"bulk copy of {nb} bytes from {sa:#x} to {da:#x}: not 16-byte aligned"
                )
            mbx = where_shared(m, W, ins, mb(W, lane)) if mb else None
            mc_ = mcast(W, lane) if mcast else 0

            def go(da=da, sa=sa, nb=nb, mbx=mbx, mc_=mc_):
                if src == "global":
                    data = m.mem(sa, nb, W, ins)
                else:
                    c, o = where_shared(m, W, ins, sa)
                    cx.check_read(c, o, nb)
                    data = c.smem[o : o + nb]
                if dst == "global":
                    out = m.mem(da, nb, W, ins)
                    if red:
                        es = SIZE[ty]
                        out[:] = tma.reduce_elements(
                            ty, op, out.reshape(-1, es), data.reshape(-1, es)
                        ).reshape(-1)
                    else:
                        out[:] = data
                else:
                    c0, o = where_shared(m, W, ins, da)
                    targets = (
                        [(c0, mbx)]
                        if not mcast
                        else [(x, (x, mbx[1])) for x in W.cta.cluster.ctas if mc_ >> x.rank & 1]
                    )
                    for c, b in targets:
                        if red:
                            es = SIZE[ty]
                            c.smem[o : o + nb] = tma.reduce_elements(
                                ty, op, c.smem[o : o + nb].reshape(-1, es), data.reshape(-1, es)
                            ).reshape(-1)
                        else:
                            c.smem[o : o + nb] = data
                        c.shadow[o : o + nb] = 1
                        if b:
                            cx.mbar_complete_tx(*b, nb)

            if mb:
                m.defer((W, f"tma{id(go)}"), go)
            elif m.late():
                W.bulk.append(go)
            else:
                go()
                W.bulk.append(None)

    return run


def tensor(m, p, ins, red):
    mods, a = ins.mods, ins.args
    if any(x.startswith("im2col") for x in mods):
        return None
    spaces = [x for x in mods if x in ("global", "shared::cta", "shared::cluster")]
    load = not red and spaces[0] != "global"
    gather = "tile::gather4" in mods or "tile::scatter4" in mods
    if load:
        dmem, tmem, rest = a[0], a[1], a[2:]
    else:
        tmem, dmem, rest = a[0], a[1], a[2:]
    sm, tm = address(p, dmem), address(p, Mem(tmem.base, tmem.offset))
    co = [reader(p, x, 4) for x in tmem.coords]
    op = (
        next(
            (x for x in mods if x in ("add", "min", "max", "and", "or", "xor", "inc", "dec")), None
        )
        if red
        else None
    )
    mb = address(p, rest[0]) if load else None
    mcast = reader(p, rest[1], 2) if "multicast::cluster" in mods else None
    pair = "cta_group::2" in mods

    def run(W, mask):

        cx = Ctx(m, p, ins, W, mask)
        for lane in lanes_of(mask):
            ta = tm(W, lane)
            if ta & 63:
                m.fail(W, ins, f"tensor map at {ta:#x} is not 64-byte aligned")
            desc = m.tensor_map(ta, W, ins)
            c = [f(W, lane) for f in co]
            c = [x - (1 << 32) if x >> 31 else x for x in c]
            cta, off = where_shared(m, W, ins, sm(W, lane))
            mbx = where_shared(m, W, ins, mb(W, lane)) if load else None
            mc_ = mcast(W, lane) if mcast else 0
            if load and mbx[0] is not cta and not pair and not mcast:
                m.fail(W, ins, "the mbarrier is not in the destination CTA")

            def mem(addr, n):
                return m.mem(addr, n, W, ins)

            def go(desc=desc, c=c, cta=cta, off=off, mbx=mbx, mc_=mc_):
                try:
                    if load:
                        fn = tma.load_gather4 if gather else tma.load
                        if mcast:
                            flip = pair and (mbx[0].rank ^ W.cta.rank) & 1
                            ts = [
                                (x, W.cta.cluster.ctas[x.rank ^ 1 if flip else x.rank])
                                for x in W.cta.cluster.ctas
                                if mc_ >> x.rank & 1
                            ]
                        else:
                            ts = [(cta, mbx[0])]
                        for t, b in ts:
                            n = fn(desc, c, t.smem, off, mem=mem)
                            t.shadow[off : off + n] = 1
                            cx.mbar_complete_tx(b, mbx[1], n)
                    else:
                        n = desc.nbytes
                        cx.check_read(cta, off, n)
                        if red:
                            tma.reduce(desc, c, cta.smem, off, op, mem=mem)
                        elif gather:
                            tma.store_scatter4(desc, c, cta.smem, off, mem=mem)
                        else:
                            tma.store(desc, c, cta.smem, off, mem=mem)
                except tma.TmaError as e:
                    m.fail(W, ins, f"TMA: {e}")

            if load:
                m.defer((W, f"tma{id(go)}"), go)
            elif m.late():
                W.bulk.append(go)
            else:
                go()
                W.bulk.append(None)

    return run


def st_async(m, p, ins):
    """st.async / red.async: remote shared store that completes bytes on an mbarrier"""
    mods, a = ins.mods, ins.args
    ty = mods[-1]
    es = SIZE[ty]
    ad, mb = address(p, a[0]), address(p, a[2])
    vals = [reader(p, x, es) for x in (a[1] if isinstance(a[1], Vec) else [a[1]])]
    red = mods[0] == "red"
    op = next(
        (x for x in mods if x in ("add", "min", "max", "and", "or", "xor", "inc", "dec")), None
    )

    def run(W, mask):

        cx = Ctx(m, p, ins, W, mask)
        for lane in lanes_of(mask):
            c, o = where_shared(m, W, ins, ad(W, lane))
            b = where_shared(m, W, ins, mb(W, lane))
            data = np.frombuffer(
                b"".join(f(W, lane).to_bytes(es, "little") for f in vals), np.uint8
            )

            def go(c=c, o=o, b=b, data=data):
                n = len(data)
                if red:
                    c.smem[o : o + n] = tma.reduce_elements(
                        ty, op, c.smem[o : o + n].reshape(-1, es), data.reshape(-1, es)
                    ).reshape(-1)
                else:
                    c.smem[o : o + n] = data
                c.shadow[o : o + n] = 1
                cx.mbar_complete_tx(*b, n)

            m.defer((W, f"tma{id(go)}"), go)

    return run
