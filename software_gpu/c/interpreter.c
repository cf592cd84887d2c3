/* flags: bit0 = warp-aligned (all live lanes must be here) */
int run(Warp *w, Prog *g, int64_t budget) {
    uint8_t *R = w->R;
    uint32_t *P = w->P;
    Ins *ins = g->ins;
    uint64_t *cnt = g->count;
    int64_t n0 = budget;
    int pc, next;
    uint32_t m, oth;
    if (w->resume) {
        for (int l = 0; l < 32; l++)
            if (w->group >> l & 1) w->pc[l] = w->trap_pc + 1;
        w->resume = 0;
    }
#define SAVE()                                                                                     \
    {                                                                                              \
        for (int l = 0; l < 32; l++)                                                               \
            if (m >> l & 1) w->pc[l] = pc;                                                         \
    }
#define FAULT()                                                                                    \
    {                                                                                              \
        SAVE();                                                                                    \
        w->mask = em;                                                                              \
        w->group = m;                                                                              \
        w->trap_pc = pc;                                                                           \
        w->icount += n0 - budget;                                                                  \
        return R_FAULT;                                                                            \
    }
reselect:
    if (!w->alive) {
        w->icount += n0 - budget;
        return R_EXIT;
    }
    {
        uint32_t rn = w->alive & ~w->blocked;
        if (!rn) {
            w->icount += n0 - budget;
            return R_BLOCKED;
        }
        pc = INT_MAX;
        next = INT_MAX;
        m = 0;
        for (int l = 0; l < 32; l++)
            if (rn >> l & 1)
                if (w->pc[l] < pc) pc = w->pc[l];
        for (int l = 0; l < 32; l++)
            if (rn >> l & 1) {
                if (w->pc[l] == pc)
                    m |= 1u << l;
                else if (w->pc[l] < next)
                    next = w->pc[l];
            }
        oth = rn & ~m;
    }
    for (;;) {
        if (oth && pc >= next) {
            SAVE();
            goto reselect;
        }
        if (budget-- <= 0) {
            SAVE();
            w->group = m;
            w->trap_pc = pc;
            w->icount += n0 - budget;
            return R_BUDGET;
        }
        Ins *I = ins + pc;
        uint32_t em = m;
        int64_t imm = I->imm;
        (void)imm;
        if (I->flags & 1) {
            uint32_t need = w->alive;
            if (need & ~m) {
                uint32_t bl = 0;
                for (int l = 0; l < 32; l++)
                    if ((w->blocked >> l & 1) && w->pc[l] == pc) bl |= 1u << l;
                SAVE();
                if (bl)
                    w->blocked &= ~bl;
                else {
                    w->blocked |= m;
                }
                goto reselect;
            }
        }
        if (I->pred >= 0) {
            uint32_t p = P[I->pred];
            em &= I->pneg ? ~p : p;
            if (!em) {
                pc++;
                continue;
            }
        }
        cnt[pc]++;
        switch (I->op) {
            /* CASES */
        case OP_selp_16: {
            uint16_t *d = (uint16_t *)(R + I->d), *A = (uint16_t *)(R + I->a),
                     *B = (uint16_t *)(R + I->b);
            uint32_t p = P[I->c];
            if (I->e) p = ~p;
            LOOP1(d[i] = (p >> i & 1) ? A[i] : B[i];)
        } break;
        case OP_selp_32: {
            uint32_t *d = (uint32_t *)(R + I->d), *A = (uint32_t *)(R + I->a),
                     *B = (uint32_t *)(R + I->b);
            uint32_t p = P[I->c];
            if (I->e) p = ~p;
            LOOP1(d[i] = (p >> i & 1) ? A[i] : B[i];)
        } break;
        case OP_selp_64: {
            uint64_t *d = (uint64_t *)(R + I->d), *A = (uint64_t *)(R + I->a),
                     *B = (uint64_t *)(R + I->b);
            uint32_t p = P[I->c];
            if (I->e) p = ~p;
            LOOP1(d[i] = (p >> i & 1) ? A[i] : B[i];)
        } break;
        case OP_slct_32: {
            uint32_t *d = (uint32_t *)(R + I->d), *A = (uint32_t *)(R + I->a),
                     *B = (uint32_t *)(R + I->b);
            int32_t *C = (int32_t *)(R + I->c);
            float *CF = (float *)C;
            LOOP1(d[i] = (imm ? CF[i] >= 0 : C[i] >= 0) ? A[i] : B[i];)
        } break;
        case OP_slct_64: {
            uint64_t *d = (uint64_t *)(R + I->d), *A = (uint64_t *)(R + I->a),
                     *B = (uint64_t *)(R + I->b);
            int32_t *C = (int32_t *)(R + I->c);
            LOOP1(d[i] = C[i] >= 0 ? A[i] : B[i];)
        } break;
        /* predicate logic; e bit0: negate a, bit1: negate b */
        case OP_and_pred: {
            uint32_t x = P[I->a], y = P[I->b];
            if (I->e & 1) x = ~x;
            if (I->e & 2) y = ~y;
            P[I->d] = (P[I->d] & ~em) | (x & y & em);
        } break;
        case OP_or_pred: {
            uint32_t x = P[I->a], y = P[I->b];
            if (I->e & 1) x = ~x;
            if (I->e & 2) y = ~y;
            P[I->d] = (P[I->d] & ~em) | ((x | y) & em);
        } break;
        case OP_xor_pred: {
            uint32_t x = P[I->a], y = P[I->b];
            if (I->e & 1) x = ~x;
            if (I->e & 2) y = ~y;
            P[I->d] = (P[I->d] & ~em) | ((x ^ y) & em);
        } break;
        case OP_not_pred: {
            uint32_t x = P[I->a];
            if (I->e & 1) x = ~x;
            P[I->d] = (P[I->d] & ~em) | (~x & em);
        } break;
        case OP_mov_pred: {
            uint32_t x = P[I->a];
            if (I->e & 1) x = ~x;
            P[I->d] = (P[I->d] & ~em) | (x & em);
        } break;
        case OP_bra:
            if (em == m) {
                pc = I->target;
                continue;
            } else {
                for (int l = 0; l < 32; l++)
                    if (m >> l & 1) w->pc[l] = (em >> l & 1) ? I->target : pc + 1;
                goto reselect;
            }
        case OP_exit:
            w->alive &= ~em;
            if (em == m) goto reselect;
            m &= ~em;
            break;
        case OP_nop: break;
        case OP_proxyfence:
            for (int r = 0; r < w->nrank; r++) {
                uint8_t *q = w->shadow[r];
                for (int64_t x = w->dlo; x < w->dhi; x++) q[x] = q[x] == w->tag ? 1 : q[x];
            }
            w->dlo = INT64_MAX;
            w->dhi = 0;
            /* whoever has seen them arrive may order them */
            for (int64_t x = w->arrived[0]; x < w->arrived[1]; x++)
                w->shadow[w->rank][x] = w->shadow[w->rank][x] == 255 ? 1 : w->shadow[w->rank][x];
            w->arrived[0] = INT64_MAX;
            w->arrived[1] = 0;
            w->stores++;
            break;
        case OP_ld: { /* a: address reg, b: address size, c: element bytes, e: register bytes,
                         flags>>8 space, imm offset, d: sign-extend, target: vec of dst */
            int sp = I->flags >> 8, es = I->c, rs = I->e, nv = I->nvec;
            int32_t *v = g->vecs + I->vec;
            int tot = es * nv;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1) {
                    uint64_t ad = (I->b == 4 ? (uint64_t)((uint32_t *)(R + I->a))[i]
                                             : ((uint64_t *)(R + I->a))[i]) +
                                  imm;
                    if (sp == 1 || sp == 2 || sp == 3) ad &= (I->b == 4 ? 0xffffffffull : ~SHB);
                    uint8_t *p = resolve(w, g, sp, ad, tot, i, 0, pc);
                    if (!p) {
                        FAULT();
                    }
                    for (int k = 0; k < nv; k++) {
                        if (v[k] < 0) continue;
                        uint64_t x = 0;
                        memcpy(&x, p + k * es, es);
                        if (I->d && es < 8) {
                            int sft = 64 - 8 * es;
                            x = (uint64_t)((int64_t)(x << sft) >> sft);
                        }
                        wreg(R + v[k], rs, i, x);
                    }
                }
        } break;
        case OP_st: {
            int sp = I->flags >> 8, es = I->c, rs = I->e, nv = I->nvec;
            int32_t *v = g->vecs + I->vec;
            int tot = es * nv;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1) {
                    uint64_t ad = (I->b == 4 ? (uint64_t)((uint32_t *)(R + I->a))[i]
                                             : ((uint64_t *)(R + I->a))[i]) +
                                  imm;
                    if (sp == 1 || sp == 2 || sp == 3) ad &= (I->b == 4 ? 0xffffffffull : ~SHB);
                    uint8_t *p = resolve(w, g, sp, ad, tot, i, 1, pc);
                    if (!p) {
                        FAULT();
                    }
                    for (int k = 0; k < nv; k++) {
                        uint64_t x = rreg(R + v[k], rs, i);
                        memcpy(p + k * es, &x, es);
                    }
                }
        } break;
        case OP_atom: { /* vec: nv sources then nv dests(-1) then compare value; c: element bytes;
                           e: atom op | type<<8 | regbytes<<16 | lanes-per-register(1,2)<<24 */
            int sp = I->flags >> 8, es = I->c, o = I->e & 255, t = (I->e >> 8) & 255,
                rs = (I->e >> 16) & 255, pk = (I->e >> 24) & 255, nv = I->nvec;
            int32_t *v = g->vecs + I->vec;
            int rb = es * pk, tot = rb * nv;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1) {
                    uint64_t ad = (I->b == 4 ? (uint64_t)((uint32_t *)(R + I->a))[i]
                                             : ((uint64_t *)(R + I->a))[i]) +
                                  imm;
                    uint8_t *p = resolve(w, g, sp, ad, tot, i, 0, pc);
                    if (!p) {
                        FAULT();
                    }
                    p = resolve(w, g, sp, ad, tot, i, 1, pc);
                    for (int k = 0; k < nv; k++) {
                        uint64_t x = rreg(R + v[k], rs, i),
                                 x2 = v[2 * nv] >= 0 ? rreg(R + v[2 * nv], rs, i) : 0, old = 0,
                                 res = 0;
                        memcpy(&old, p + k * rb, rb);
                        if (pk == 1)
                            res = atom_op(o, t, old, x, x2);
                        else
                            res = (atom_op(o, t, old & 0xffff, x & 0xffff, 0) & 0xffff) |
                                  ((atom_op(o, t, (old >> 16) & 0xffff, (x >> 16) & 0xffff, 0) &
                                    0xffff)
                                   << 16);
                        memcpy(p + k * rb, &res, rb);
                        if (v[nv + k] >= 0) wreg(R + v[nv + k], rs, i, old);
                    }
                }
        } break;
        case OP_pack: {
            int nv = I->nvec, es = I->c;
            int32_t *v = g->vecs + I->vec;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1) {
                    uint64_t x = 0;
                    for (int k = 0; k < nv; k++) x |= rreg(R + v[k], es, i) << (8 * es * k);
                    wreg(R + I->d, I->e, i, x);
                }
        } break;
        case OP_unpack: {
            int nv = I->nvec, es = I->c;
            int32_t *v = g->vecs + I->vec;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1) {
                    uint64_t x = rreg(R + I->a, I->e, i);
                    for (int k = 0; k < nv; k++)
                        if (v[k] >= 0) wreg(R + v[k], es, i, x >> (8 * es * k));
                }
        } break;
        case OP_cvt: {
            int st = imm & 15, dt = (imm >> 4) & 15, mode = (imm >> 8) & 15, fl = (imm >> 12) & 255;
            for (int i = 0; i < 32; i++)
                if (em >> i & 1)
                    wreg(R + I->d, I->e, i, cvt_any(rreg(R + I->a, I->c, i), st, dt, mode, fl));
        } break;
        case OP_bfi_32: {
            uint32_t *d = (uint32_t *)(R + I->d), *A = (uint32_t *)(R + I->a),
                     *B = (uint32_t *)(R + I->b), *C = (uint32_t *)(R + I->c),
                     *E = (uint32_t *)(R + I->e);
            LOOP1(uint32_t s = C[i] & 255; uint32_t l = E[i] & 255;
                  uint32_t mk = l == 0 || s >= 32 ? 0 : ((l >= 32 ? ~0u : ((1u << l) - 1)) << s);
                  d[i] = (B[i] & ~mk) | (s < 32 ? ((A[i] << s) & mk) : 0);)
        } break;
        case OP_bfi_64: {
            uint64_t *d = (uint64_t *)(R + I->d), *A = (uint64_t *)(R + I->a),
                     *B = (uint64_t *)(R + I->b);
            uint32_t *C = (uint32_t *)(R + I->c), *E = (uint32_t *)(R + I->e);
            LOOP1(uint32_t s = C[i] & 255; uint32_t l = E[i] & 255;
                  uint64_t mk =
                      l == 0 || s >= 64 ? 0 : ((l >= 64 ? ~0ull : ((1ull << l) - 1)) << s);
                  d[i] = (B[i] & ~mk) | (s < 64 ? ((A[i] << s) & mk) : 0);)
        } break;
        case OP_activemask: {
            LOOP1(((uint32_t *)(R + I->d))[i] = m;)
        } break;
        case OP_shfl:
        case OP_vote:
        case OP_elect:
        case OP_redux:
        case OP_warpsync:
        case OP_match_any:
        case OP_match_all: {
            /* member mask register in c */
            uint32_t mm = ((uint32_t *)(R + I->c))[__builtin_ctz(em)], need = mm & w->alive;
            if (need & ~m) {
                uint32_t bl = 0;
                for (int l = 0; l < 32; l++)
                    if ((w->blocked >> l & 1) && w->pc[l] == pc) bl |= 1u << l;
                cnt[pc]--;
                SAVE();
                if (bl)
                    w->blocked &= ~bl;
                else
                    w->blocked |= m;
                goto reselect;
            }
            uint32_t act = em & mm;
            if (I->op == OP_shfl) { /* imm: 0 idx 1 up 2 down 3 bfly; b: lane operand, e: clamp
                                       operand, target: pred dest or -1 */
                uint32_t *d = (uint32_t *)(R + I->d), *A = (uint32_t *)(R + I->a),
                         *B = (uint32_t *)(R + I->b), *E = (uint32_t *)(R + I->e), s[32];
                memcpy(s, A, 128);
                uint32_t pp = 0;
                for (int i = 0; i < 32; i++)
                    if (em >> i & 1) {
                        int bv = B[i] & 31, cv = E[i] & 31, sm = (E[i] >> 8) & 31,
                            mx = (i & sm) | (cv & ~sm), mn = i & sm, j, ok;
                        switch (imm) {
                        case 0:
                            j = mn | (bv & ~sm);
                            ok = j <= mx;
                            break;
                        case 1:
                            j = i - bv;
                            ok = j >= mx;
                            break;
                        case 2:
                            j = i + bv;
                            ok = j <= mx;
                            break;
                        default: j = i ^ bv; ok = j <= mx;
                        }
                        if (!ok)
                            j = i;
                        else
                            pp |= 1u << i;
                        d[i] = s[j & 31];
                    }
                if (I->target >= 0) P[I->target] = (P[I->target] & ~em) | (pp & em);
            } else if (I->op == OP_vote) {
                uint32_t p = P[I->a];
                if (I->e & 1) p = ~p;
                p &= act;
                if (imm == 0) {
                    LOOP1(((uint32_t *)(R + I->d))[i] = p;)
                } else {
                    int r = imm == 1 ? p == act : imm == 2 ? p != 0 : (p == act || p == 0);
                    P[I->d] = (P[I->d] & ~em) | (r ? em : 0);
                }
            } else if (I->op == OP_elect) {
                int ld = __builtin_ctz(act ? act : em);
                if (I->d >= 0)
                    LOOP1(((uint32_t *)(R + I->d))[i] = ld;)
                    P[I->e] = (P[I->e] & ~em) | ((1u << ld) & em);
            } else if (I->op == OP_redux) {
                uint32_t *d = (uint32_t *)(R + I->d), *A = (uint32_t *)(R + I->a), acc = 0;
                int f = 1;
                for (int i = 0; i < 32; i++)
                    if (act >> i & 1) {
                        uint32_t x = A[i];
                        if ((imm >> 16) & 1) x &= 0x7fffffffu;
                        if (f) {
                            acc = x;
                            f = 0;
                        } else {
                            float fa = u2f(acc), fx = u2f(x);
                            switch (imm & 0xff) {
                            case 0: acc += x; break;
                            case 1: acc = acc < x ? acc : x; break;
                            case 2: acc = acc > x ? acc : x; break;
                            case 3: acc &= x; break;
                            case 4: acc |= x; break;
                            case 5: acc ^= x; break;
                            case 6: acc = (int32_t)acc < (int32_t)x ? acc : x; break;
                            case 7: acc = (int32_t)acc > (int32_t)x ? acc : x; break;
                            case 8: acc = f2u(minf(fa, fx)); break;
                            case 9: acc = f2u(maxf(fa, fx)); break;
                            case 10: acc = f2u(minnf(fa, fx)); break;
                            case 11: acc = f2u(maxnf(fa, fx)); break;
                            }
                        }
                    }
                LOOP1(d[i] = acc;)
            } else if (I->op == OP_match_any || I->op == OP_match_all) {
                uint64_t v[32];
                for (int i = 0; i < 32; i++)
                    v[i] = I->b == 8 ? ((uint64_t *)(R + I->a))[i] : ((uint32_t *)(R + I->a))[i];
                uint32_t r[32], all = 1;
                for (int i = 0; i < 32; i++)
                    if (act >> i & 1) {
                        r[i] = 0;
                        for (int j = 0; j < 32; j++)
                            if ((act >> j & 1) && v[i] == v[j]) r[i] |= 1u << j;
                        if (r[i] != act) all = 0;
                    }
                for (int i = 0; i < 32; i++)
                    if (em >> i & 1)
                        ((uint32_t *)(R + I->d))[i] =
                            I->op == OP_match_any ? r[i] : (all ? act : 0);
                if (I->e >= 0) P[I->e] = (P[I->e] & ~em) | (all ? em : 0);
            }
        } break;
        case OP_ldmatrix:
        case OP_stmatrix: { /* a address, b address size, nvec matrices, imm offset, e: trans */
            int nv = I->nvec;
            int32_t *v = g->vecs + I->vec;
            uint8_t *row[32];
            int isst = I->op == OP_stmatrix;
            for (int i = 0; i < 8 * nv; i++) {
                uint64_t ad = (I->b == 4 ? (uint64_t)((uint32_t *)(R + I->a))[i]
                                         : ((uint64_t *)(R + I->a))[i]) +
                              imm;
                int sp = I->flags >> 8;
                if (I->b == 4) ad &= 0xffffffffull;
                row[i] = resolve(w, g, sp, ad, 16, i, isst, pc);
                if (!row[i]) {
                    FAULT();
                }
            }
            for (int j = 0; j < nv; j++)
                for (int t = 0; t < 32; t++)
                    for (int h = 0; h < 2; h++) {
                        int r = I->e ? 2 * (t & 3) + h : t >> 2,
                            c = I->e ? t >> 2 : 2 * (t & 3) + h;
                        uint16_t *mp = (uint16_t *)row[8 * j + r] + c,
                                 *rp = (uint16_t *)(R + v[j]) + 2 * t + h;
                        if (isst)
                            *mp = *rp;
                        else
                            *rp = *mp;
                    }
        } break;
        case OP_trap:
        default: {
            cnt[pc]--;
            SAVE();
            w->mask = em;
            w->group = m;
            w->trap_pc = pc;
            w->icount += n0 - budget;
            return R_TRAP;
        }
        }
        pc++;
    }
}
