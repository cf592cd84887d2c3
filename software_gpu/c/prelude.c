#include <stdint.h>
#include <string.h>
#include <math.h>
#include <limits.h>
typedef uint16_t f16;
typedef uint16_t bf16;
typedef struct {
    uint16_t op;
    uint8_t pneg, nvec;
    int32_t pred, d, a, b, c, e, vec;
    int64_t imm;
    int32_t target, flags;
} Ins;
typedef struct {
    uint64_t lo, hi;
} Range;
typedef struct {
    uint8_t *R;
    uint32_t *P;
    uint8_t *local;
    uint8_t **smem;
    uint8_t **shadow;
    int64_t local_size, smem_size;
    int32_t nrank, rank;
    int32_t tag, widx;
    int32_t pc[32];
    uint32_t alive, blocked;
    uint32_t mask, group;
    int32_t trap_pc, fault_lane;
    uint64_t fault_addr;
    uint64_t icount, stores, uninit;
    int32_t uninit_pc, fault_kind, resume, pad;
    int64_t dlo, dhi; /* shared bytes written since the last proxy fence (all ranks) */
    int64_t *arrived; /* the same of copies that have arrived at an mbarrier: of the CTA */
} Warp;
typedef struct {
    Ins *ins;
    int32_t *vecs;
    Range *ranges;
    uint64_t *count;
    int64_t n, nranges;
} Prog;
enum { R_EXIT = 0, R_TRAP = 1, R_BUDGET = 2, R_BLOCKED = 3, R_FAULT = 4 };
#define SHB (1ull << 60)
#define LOB (1ull << 61)
static inline float u2f(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t f2u(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float FZ(float f) { return fabsf(f) < 1.17549435e-38f ? copysignf(0.0f, f) : f; }
static inline float SATF(float f) { return f > 1.0f ? 1.0f : (f > 0.0f ? f : 0.0f); }
static inline float relu(float f) { return f > 0.0f ? f : (f != f ? f : 0.0f); }
static inline float maxf(float a, float b) {
    return a != a                               ? (b != b ? u2f(0x7fffffffu) : b)
           : b != b                             ? a
           : (a > b || (a == b && !signbit(a))) ? a
                                                : b;
}
static inline float minf(float a, float b) {
    return a != a                              ? (b != b ? u2f(0x7fffffffu) : b)
           : b != b                            ? a
           : (a < b || (a == b && signbit(a))) ? a
                                               : b;
}
static inline float maxnf(float a, float b) {
    return (a != a || b != b) ? u2f(0x7fffffffu) : maxf(a, b);
}
static inline float minnf(float a, float b) {
    return (a != a || b != b) ? u2f(0x7fffffffu) : minf(a, b);
}
static inline float b2f(bf16 h) { return u2f((uint32_t)h << 16); }
static inline bf16 f2b(float f) {
    uint32_t u = f2u(f);
    uint32_t r = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bf16)r;
}
static inline bf16 f2b_rz(float f) {
    uint32_t u = f2u(f);
    return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bf16)(u >> 16);
}
static inline float h2f(f16 h) {
    uint32_t s = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 0) {
        float v = (float)m * 5.9604644775390625e-8f;
        return s ? -v : v;
    }
    if (e == 31) return u2f(s | 0x7f800000u | (m << 13));
    return u2f(s | ((e + 112) << 23) | (m << 13));
}
/* round a double to a small float format with p mantissa bits, min exponent emin, to nearest even;
 * returns the rounded value */
static double rnd_small(double x, int p, int emin) {
    if (x == 0 || x != x || isinf(x)) return x;
    int e;
    frexp(x, &e);
    e -= 1;
    if (e < emin) e = emin;
    double q = ldexp(1.0, e - p);
    return nearbyint(x / q) * q;
}
static f16 d2h(double x) {
    uint16_t s = signbit(x) ? 0x8000 : 0;
    if (x != x) return 0x7fff;
    x = fabs(x);
    if (x >= 65520.0) return s | 0x7c00;
    x = rnd_small(x, 10, -14);
    if (x < 6.103515625e-05) return s | (uint16_t)(x * 16777216.0);
    int e;
    double m = frexp(x, &e);
    return s | (uint16_t)(((e - 1 + 15) << 10) + (int)((m * 2 - 1) * 1024));
}
static inline f16 f2h(float f) {
    uint32_t u = f2u(f), s = (u >> 16) & 0x8000, a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return 0x7fff;
    if (a >= 0x477ff000u) return s | 0x7c00;
    if (a < 0x38800000u) return d2h(f);
    uint32_t r = a + 0xfffu + ((a >> 13) & 1);
    return s | (uint16_t)((r - 0x38000000u) >> 13);
}
static bf16 d2b(double x) {
    if (x != x) return 0x7fff;
    float f = (float)rnd_small(x, 7, -126);
    return (bf16)(f2u(f) >> 16);
}
static uint32_t f2e4m3(float f) {
    uint32_t s = signbit(f) ? 0x80 : 0;
    if (f != f) return 0x7f;
    double x = rnd_small(fabs((double)f), 3, -6);
    if (x > 448) x = 448;
    if (x < 0.015625) return s | (uint32_t)(x * 512);
    int e;
    double m = frexp(x, &e);
    return s | (uint32_t)(((e - 1 + 7) << 3) + (int)((m * 2 - 1) * 8));
}
static uint32_t f2e5m2(float f) {
    uint32_t s = signbit(f) ? 0x80 : 0;
    if (f != f) return 0x7f;
    double x = rnd_small(fabs((double)f), 2, -14);
    if (x > 57344) x = 57344;
    if (x < 6.103515625e-05) return s | (uint32_t)(x * 65536);
    int e;
    double m = frexp(x, &e);
    return s | (uint32_t)(((e - 1 + 15) << 2) + (int)((m * 2 - 1) * 4));
}
static float e4m32f(uint32_t v) {
    float s = v & 0x80 ? -1 : 1;
    int e = (v >> 3) & 15, m = v & 7;
    if (e == 15 && m == 7) return u2f(0x7fffffff);
    return e ? s * ldexpf(1 + m / 8.0f, e - 7) : s * ldexpf(m / 8.0f, -6);
}
static float e5m22f(uint32_t v) {
    float s = v & 0x80 ? -1 : 1;
    int e = (v >> 2) & 31, m = v & 3;
    if (e == 31) return m ? u2f(0x7fffffff) : s * INFINITY;
    return e ? s * ldexpf(1 + m / 4.0f, e - 15) : s * ldexpf(m / 4.0f, -14);
}
static uint32_t f2tf32(float f, int64_t mode) {
    uint32_t u = f2u(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffffff;
    if (mode == 0)
        u += 0x1000;
    else if (mode == 1)
        u += 0xfffu + ((u >> 13) & 1);
    return u & 0xffffe000u;
}
static float fix_dir(float s, double hi, double lo,
                     int mode) { /* exact value is hi+lo; s = rn(hi) */
    double d = (double)s;
    int c = d < hi ? -1 : d > hi ? 1 : (lo > 0 ? -1 : lo < 0 ? 1 : 0); /* -1: s below exact */
    if (c == 0 || isinf(hi) || hi != hi) return s;
    if (mode == 2 && c > 0) return nextafterf(s, -INFINITY);
    if (mode == 3 && c < 0) return nextafterf(s, INFINITY);
    if (mode == 1) {
        if (hi > 0 && c > 0) return nextafterf(s, -INFINITY);
        if (hi < 0 && c < 0) return nextafterf(s, INFINITY);
    }
    return s;
}
static float add_dir(float a, float b, int64_t mode) {
    double x = a, y = b, h = x + y, bb = h - x, l = (x - (h - bb)) + (y - bb);
    if (h == 0 && mode == 2 && (a != 0 || b != 0 || signbit(a) || signbit(b))) return -0.0f;
    return fix_dir((float)h, h, l, (int)mode);
}
static float fma_dir(float a, float b, float c, int64_t mode) {
    double x = (double)a * (double)b, y = c, h = x + y, bb = h - x, l = (x - (h - bb)) + (y - bb);
    return fix_dir((float)h, h, l, (int)mode);
}
static inline uint32_t brev32(uint32_t x) {
    uint32_t r = 0;
    for (int i = 0; i < 32; i++) r |= ((x >> i) & 1u) << (31 - i);
    return r;
}
static inline uint64_t brev64(uint64_t x) {
    return ((uint64_t)brev32((uint32_t)x) << 32) | brev32((uint32_t)(x >> 32));
}
static inline uint64_t bfe_u(uint64_t a, uint32_t b, uint32_t c, int w) {
    b &= 255;
    c &= 255;
    if (c == 0 || b >= (uint32_t)w) return 0;
    a >>= b;
    if (c < 64) a &= ((1ull << c) - 1);
    return a;
}
static inline int64_t bfe_s(int64_t a, uint32_t b, uint32_t c, int w) {
    b &= 255;
    c &= 255;
    if (c == 0) return 0;
    if (b >= (uint32_t)w) return a < 0 ? -1 : 0;
    if (b + c >= (uint32_t)w) return a >> b;
    return (int64_t)((uint64_t)a << (64 - b - c)) >> (64 - c);
}
static inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, int64_t t) {
    uint32_t r = 0;
    if (t & 1) r |= ~a & ~b & ~c;
    if (t & 2) r |= ~a & ~b & c;
    if (t & 4) r |= ~a & b & ~c;
    if (t & 8) r |= ~a & b & c;
    if (t & 16) r |= a & ~b & ~c;
    if (t & 32) r |= a & ~b & c;
    if (t & 64) r |= a & b & ~c;
    if (t & 128) r |= a & b & c;
    return r;
}
static inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t c, int64_t mode) {
    uint64_t v = ((uint64_t)b << 32) | a;
    uint32_t r = 0;
    int s[4];
    if (mode == 0)
        for (int i = 0; i < 4; i++) s[i] = (c >> (4 * i)) & 15;
    else {
        int k = c & 3;
        for (int i = 0; i < 4; i++)
            s[i] = mode == 1   ? k + i
                   : mode == 2 ? ((k - i) & 7)
                   : mode == 3 ? k
                   : mode == 4 ? (i < k ? k : i)
                   : mode == 5 ? (i < k ? i : k)
                               : (k & 1) * 2 + (i & 1);
        if (mode == 4)
            for (int i = 0; i < 4; i++) s[i] = i > k ? i : k;
        if (mode == 5)
            for (int i = 0; i < 4; i++) s[i] = i < k ? i : k;
    }
    for (int i = 0; i < 4; i++) {
        uint32_t by = (v >> (8 * (s[i] & 7))) & 255;
        if (s[i] & 8) by = (by & 128) ? 255 : 0;
        r |= by << (8 * i);
    }
    return r;
}
static inline uint32_t shf_l(uint32_t a, uint32_t b, uint32_t c, int64_t clamp) {
    c = clamp ? (c > 32 ? 32 : c) : c & 31;
    return c == 0 ? b : c == 32 ? a : (b << c) | (a >> (32 - c));
}
static inline uint32_t shf_r(uint32_t a, uint32_t b, uint32_t c, int64_t clamp) {
    c = clamp ? (c > 32 ? 32 : c) : c & 31;
    return c == 0 ? a : c == 32 ? b : (b << (32 - c)) | (a >> c);
}
static inline uint32_t dp4a_u(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 4; i++) c += ((a >> (8 * i)) & 255) * ((b >> (8 * i)) & 255);
    return c;
}
static inline uint32_t dp4a_s(uint32_t a, uint32_t b, uint32_t c) {
    for (int i = 0; i < 4; i++)
        c += (int32_t)(int8_t)(a >> (8 * i)) * (int32_t)(int8_t)(b >> (8 * i));
    return c;
}
static inline uint64_t rreg(const uint8_t *p, int sz, int i) {
    switch (sz) {
    case 1: return p[i];
    case 2: return ((uint16_t *)p)[i];
    case 4: return ((uint32_t *)p)[i];
    default: return ((uint64_t *)p)[i];
    }
}
static inline void wreg(uint8_t *p, int sz, int i, uint64_t v) {
    switch (sz) {
    case 1: p[i] = (uint8_t)v; break;
    case 2: ((uint16_t *)p)[i] = (uint16_t)v; break;
    case 4: ((uint32_t *)p)[i] = (uint32_t)v; break;
    default: ((uint64_t *)p)[i] = v;
    }
}
/* spaces: 0 global 1 shared::cta 2 shared::cluster 3 local 4 generic 5 host(param/const) */
static uint8_t *resolve(Warp *w, Prog *g, int space, uint64_t a, int size, int lane, int write,
                        int pc) {
    uint64_t a0 = a;
    w->fault_addr = a0;
    w->fault_lane = lane;
    w->fault_kind = 0;
    if (a & (uint64_t)(size - 1)) {
        w->fault_kind = 1;
        return 0;
    }
    if (space == 4) {
        if (a & SHB) {
            space = 2;
            a &= 0xffffffffull;
        } else if (a & LOB) {
            space = 3;
            a &= 0xffffffffull;
        } else
            space = 0;
    }
    if (space == 0) {
        static __thread Range last;
        if (a >= last.lo && a + size <= last.hi) {
        } else {
            int64_t lo = 0, hi = g->nranges - 1;
            int ok = 0;
            while (lo <= hi) {
                int64_t m = (lo + hi) / 2;
                if (a < g->ranges[m].lo)
                    hi = m - 1;
                else if (a >= g->ranges[m].hi)
                    lo = m + 1;
                else {
                    ok = a + size <= g->ranges[m].hi;
                    if (ok) {}
                    break;
                }
            }
            if (!ok) {
                w->fault_kind = 2;
                return 0;
            }
        }
        if (write) w->stores++;
        return (uint8_t *)a;
    }
    if (space == 5) return (uint8_t *)a;
    if (space == 1 || space == 2) {
        uint32_t rank = (uint32_t)a >> 24, off = (uint32_t)a & 0xffffff;
        if (a >> 32 || rank >= (uint32_t)w->nrank) {
            w->fault_kind = 3;
            return 0;
        }
        if (space == 1 && rank != (uint32_t)w->rank) {
            w->fault_kind = 4;
            return 0;
        }
        if ((int64_t)off + size > w->smem_size) {
            w->fault_kind = 3;
            return 0;
        }
        uint8_t *sh = w->shadow[rank] + off;
        if (write) {
            memset(sh, w->tag, size);
            w->stores++;
            if ((int64_t)off < w->dlo) w->dlo = off;
            if ((int64_t)off + size > w->dhi) w->dhi = off + size;
        } else {
            int any = 0;
            for (int x = 0; x < size; x++) any |= sh[x];
            if (!any) {
                if (!w->uninit++) w->uninit_pc = pc;
            }
        } /* a vector load may cover neighbours nobody wrote */
        return w->smem[rank] + off;
    }
    if (space == 3) {
        if ((int64_t)a + size > w->local_size) {
            w->fault_kind = 5;
            return 0;
        }
        return w->local + (int64_t)lane * w->local_size + a;
    }
    w->fault_kind = 9;
    return 0;
}
#define LOOP1(BODY)                                                                                \
    if (em == 0xffffffffu) {                                                                       \
        _Pragma("GCC ivdep") for (int i = 0; i < 32; i++) { BODY }                                 \
    } else {                                                                                       \
        for (int i = 0; i < 32; i++)                                                               \
            if (em >> i & 1) {                                                                     \
                BODY                                                                               \
            }                                                                                      \
    }
#define LOOP2(BODY)                                                                                \
    if (em == 0xffffffffu) {                                                                       \
        _Pragma("GCC ivdep") for (int i = 0; i < 64; i++) { BODY }                                 \
    } else {                                                                                       \
        for (int i = 0; i < 64; i++)                                                               \
            if (em >> (i >> 1) & 1) {                                                              \
                BODY                                                                               \
            }                                                                                      \
    }
/* The end of a setp: its result r, combined with another predicate, and the complement of it. */
#define STORE_COMPARISON()                                                                         \
    uint32_t q = ~r;                                                                               \
    if (imm) {                                                                                     \
        uint32_t c = P[I->c];                                                                      \
        if (imm & 8) c = ~c;                                                                       \
        switch (imm & 7) {                                                                         \
        case 1:                                                                                    \
            r &= c;                                                                                \
            q &= c;                                                                                \
            break;                                                                                 \
        case 2:                                                                                    \
            r |= c;                                                                                \
            q |= c;                                                                                \
            break;                                                                                 \
        case 3:                                                                                    \
            r ^= c;                                                                                \
            q ^= c;                                                                                \
            break;                                                                                 \
        }                                                                                          \
    }                                                                                              \
    if (I->d >= 0) P[I->d] = (P[I->d] & ~em) | (r & em);                                           \
    if (I->e >= 0) P[I->e] = (P[I->e] & ~em) | (q & em);
static double
cvt_load(uint64_t v, int t, int64_t *iv, uint64_t *uv,
         int *isint) { /* types: 0-3 u8 u16 u32 u64, 4-7 s8..s64, 8 f16 9 bf16 10 f32 11 f64 */
    *isint = 0;
    switch (t) {
    case 0: v = (uint8_t)v; break;
    case 1: v = (uint16_t)v; break;
    case 2: v = (uint32_t)v; break;
    case 3: break;
    case 4: v = (int64_t)(int8_t)v; break;
    case 5: v = (int64_t)(int16_t)v; break;
    case 6: v = (int64_t)(int32_t)v; break;
    case 7: break;
    case 8: return h2f((f16)v);
    case 9: return b2f((bf16)v);
    case 10: return u2f((uint32_t)v);
    case 11: {
        double d;
        memcpy(&d, &v, 8);
        return d;
    }
    }
    *isint = 1;
    *uv = v;
    *iv = (int64_t)v;
    return t < 4 ? (double)v : (double)(int64_t)v;
}
static double rnd_int(double x, int mode) {
    switch (mode) {
    case 1: return trunc(x);
    case 2: return floor(x);
    case 3: return ceil(x);
    default: return nearbyint(x);
    }
}
static uint64_t cvt_any(uint64_t v, int st, int dt, int mode,
                        int fl) { /* fl: 1 ftz 2 sat 4 relu 8 integer-rounding of a float result */
    int64_t iv = 0;
    uint64_t uv = 0;
    int isint;
    double x = cvt_load(v, st, &iv, &uv, &isint);
    if ((fl & 1) && st == 10) x = FZ((float)x);
    if (dt < 8) {
        if (isint) {
            if (fl & 2) {
                static const int bits[4] = {8, 16, 32, 64};
                int b = bits[dt & 3];
                if (st < 4) {
                    uint64_t mx = dt < 4 ? (b == 64 ? ~0ull : (1ull << b) - 1)
                                         : (b == 64 ? INT64_MAX : (1ull << (b - 1)) - 1);
                    return uv > mx ? mx : uv;
                }
                if (dt < 4) {
                    if (iv < 0) return 0;
                    uint64_t mx = b == 64 ? ~0ull : (1ull << b) - 1;
                    return (uint64_t)iv > mx ? mx : (uint64_t)iv;
                }
                if (b < 64) {
                    int64_t mx = (1ll << (b - 1)) - 1;
                    return iv > mx ? mx : iv < -mx - 1 ? (uint64_t)(-mx - 1) : (uint64_t)iv;
                }
            }
            switch (dt) {
            case 0: return (uint8_t)uv;
            case 1: return (uint16_t)uv;
            case 2: return (uint32_t)uv;
            case 4: return (int64_t)(int8_t)uv;
            case 5: return (int64_t)(int16_t)uv;
            case 6: return (int64_t)(int32_t)uv;
            default: return uv;
            }
        }
        if (x != x) return (dt == 3 || dt == 7) ? 0x8000000000000000ull : 0;
        x = rnd_int(x, mode);
        static const double lo[8] =
            {0, 0, 0, 0, -128, -32768, -2147483648.0, -9223372036854775808.0},
                            hi[8] = {255, 65535, 4294967295.0, 18446744073709551615.0,
                                     127, 32767, 2147483647.0, 9223372036854775807.0};
        if (x <= lo[dt]) return dt < 4 ? 0 : (uint64_t)(int64_t)lo[dt];
        if (x >= hi[dt]) {
            return dt == 3 ? ~0ull : dt == 7 ? (uint64_t)INT64_MAX : (uint64_t)hi[dt];
        }
        return dt < 4 ? (uint64_t)x : (uint64_t)(int64_t)x;
    }
    if (!isint && (fl & 8)) x = rnd_int(x, mode);
    if (fl & 2) {
        x = x > 1 ? 1 : (x > 0 ? x : 0);
    }
    if ((fl & 4) && x < 0) x = 0;
    if (dt == 11) {
        uint64_t r;
        if (isint) x = st < 4 ? (double)uv : (double)iv;
        memcpy(&r, &x, 8);
        return r;
    }
    if (dt == 10) {
        float f = isint ? (st < 4 ? (float)uv : (float)iv) : (float)x;
        if (!isint && mode && !(fl & 8)) f = fix_dir(f, x, 0, mode);
        if (isint && mode) f = fix_dir(f, x, 0, mode);
        if (fl & 1) f = FZ(f);
        if (f != f) f = u2f(0x7fffffff);
        return f2u(f);
    }
    if (dt == 8) {
        if (mode == 1 && x == x) {
            f16 h = d2h(x);
            if (fabs((double)h2f(h)) > fabs(x)) h -= 1;
            return h;
        }
        return d2h(x);
    }
    if (mode == 1) return f2b_rz((float)x);
    return d2b(x);
}
static uint64_t atom_op(int o, int t, uint64_t old, uint64_t v,
                        uint64_t v2) { /* o: 0 add 1 min 2 max 3 and 4 or 5 xor 6 exch 7 cas 8 inc 9
                                          dec ; t as cvt types */
    switch (o) {
    case 3: return old & v;
    case 4: return old | v;
    case 5: return old ^ v;
    case 6: return v;
    case 7: return old == v ? v2 : old;
    case 8: return (uint32_t)old >= (uint32_t)v ? 0 : old + 1;
    case 9: return ((uint32_t)old == 0 || (uint32_t)old > (uint32_t)v) ? v : old - 1;
    }
    if (t == 10) {
        float a = u2f((uint32_t)old), b = u2f((uint32_t)v);
        return f2u(o == 0 ? a + b : o == 1 ? minf(a, b) : maxf(a, b));
    }
    if (t == 11) {
        double a, b;
        memcpy(&a, &old, 8);
        memcpy(&b, &v, 8);
        a = o == 0 ? a + b : o == 1 ? fmin(a, b) : fmax(a, b);
        uint64_t r;
        memcpy(&r, &a, 8);
        return r;
    }
    if (t == 8) {
        float a = h2f((f16)old), b = h2f((f16)v);
        return f2h(o == 0 ? a + b : o == 1 ? minf(a, b) : maxf(a, b));
    }
    if (t == 9) {
        float a = b2f((bf16)old), b = b2f((bf16)v);
        return f2b(o == 0 ? a + b : o == 1 ? minf(a, b) : maxf(a, b));
    }
    if (o == 0) return old + v;
    if (t >= 4) {
        int64_t a = t == 6 ? (int32_t)old : (int64_t)old, b = t == 6 ? (int32_t)v : (int64_t)v;
        return (uint64_t)(o == 1 ? (a < b ? a : b) : (a > b ? a : b));
    }
    if (t == 2) {
        old = (uint32_t)old;
        v = (uint32_t)v;
    }
    return o == 1 ? (old < v ? old : v) : (old > v ? old : v);
}
