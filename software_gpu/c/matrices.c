/* matrix element address inside a wgmma/umma style descriptor: returns byte offset (before the
 * swizzle) */
static inline uint32_t swz(uint32_t a, int mode) {
    switch (mode) {
    case 1: return a ^ ((a >> 3) & 0x70);
    case 2: return a ^ ((a >> 3) & 0x30);
    case 3: return a ^ ((a >> 3) & 0x10);
    default: return a;
    }
}
static inline float ldel(const uint8_t *p, int ty) {
    switch (ty) {
    case 0: return h2f(*(const uint16_t *)p);
    case 1: return b2f(*(const uint16_t *)p);
    case 2: {
        uint32_t u;
        memcpy(&u, p, 4);
        return u2f(u & 0xffffe000u);
    }
    case 3: return e4m32f(*p);
    default: return e5m22f(*p);
    }
}
static int esz(int ty) { return ty == 2 ? 4 : ty < 2 ? 2 : 1; }
/* decode a rows x K operand tile (K*esz = 32 bytes) starting at matrix row r0 into out[r][k];
 * returns status bits: 1 never-written byte, 2 unfenced generic write, 4 out of range */
static int dec_op(const uint8_t *smem, const uint8_t *shadow, int64_t size, uint64_t desc, int mn,
                  int ty, int r0, int rows, float *out, int ks, int rs) {
    uint32_t start = (desc & 0x3fff) << 4, lbo = ((desc >> 16) & 0x3fff) << 4,
             sbo = ((desc >> 32) & 0x3fff) << 4;
    int mode = (desc >> 62) & 3, st = 0;
    int es = esz(ty), K = 32 / es, T = 16 / es;
    int width = mode == 1 ? 128 : mode == 2 ? 64 : mode == 3 ? 32 : 16; /* bytes of one atom row */
    for (int r = 0; r < rows; r++)
        for (int k = 0; k < K; k++) {
            int R_ = r0 + r;
            uint32_t off;
            if (!mn) {
                int kb = k * es;
                if (mode == 0)
                    off = (R_ & 7) * 16 + (R_ >> 3) * sbo + (kb & 15) + (kb >> 4) * lbo;
                else
                    off = (R_ & 7) * width + (R_ >> 3) * sbo + kb;
            } else {
                int W_ = width / es;
                if (mode == 0)
                    off = (R_ % T) * es + (R_ / T) * sbo + (k & 7) * 16 + (k >> 3) * lbo;
                else
                    off = (R_ % W_) * es + (R_ / W_) * lbo + (k & 7) * width + (k >> 3) * sbo;
            }
            uint32_t a = swz(start + off, mode);
            if ((int64_t)a + es > size) {
                st |= 4;
                continue;
            }
            uint8_t s = shadow[a];
            if (s == 0)
                st |= 1;
            else if (s >= 2)
                st |= 2;
            out[r * rs + k * ks] = ldel(smem + a, ty);
        }
    return st;
}
/* one warp's share (16 rows) of wgmma m64nNk(32/es). drow: register byte offsets (N/2 f32, or N/4
 * packed f16). areg: 4 register offsets or NULL */
int wgmma(uint8_t *R, const int32_t *drow, int N, int ty, int tyb, int dhalf, const uint8_t *afrag,
          uint64_t ad, uint64_t bd, int ta, int tb, int sa, int sb, int scaled, const uint8_t *smem,
          const uint8_t *shadow, int64_t size, int wg) {
    static __thread float A[16 * 32], B[32 * 256], C[16 * 256];
    int es = esz(ty), K = 32 / es, st = 0;
    if (afrag) { /* lane t, reg q: bytes; each 32-bit register holds 4/es elements */
        int pe = 4 / es;
        for (int t = 0; t < 32; t++)
            for (int q = 0; q < 4; q++)
                for (int h = 0; h < pe; h++) {
                    int r = (t >> 2) + 8 * (q & 1), k = (t & 3) * pe + h + (q >> 1) * 4 * pe;
                    A[r * K + k] = ldel(afrag + q * 128 + t * 4 + h * es, ty);
                }
    } else
        st |= dec_op(smem, shadow, size, ad, ta, ty, 16 * wg, 16, A, 1, K);
    st |= dec_op(smem, shadow, size, bd, tb, tyb, 0, N, B, N, 1) << 4;
    float s = (float)(sa * sb);
    for (int r = 0; r < 16; r++) {
        float *c = C + r * N;
        for (int n = 0; n < N; n++) c[n] = 0;
        for (int k = 0; k < K; k++) {
            float a = A[r * K + k] * s;
            const float *b = B + k * N;
            for (int n = 0; n < N; n++) c[n] += a * b[n];
        }
    }
    for (int j = 0; j < N / 8; j++)
        for (int h = 0; h < 2; h++)
            for (int q = 0; q < 2; q++)
                for (int t = 0; t < 32; t++) {
                    float v = C[((t >> 2) + 8 * h) * N + 8 * j + 2 * (t & 3) + q];
                    if (!dhalf) {
                        float *d = (float *)(R + drow[4 * j + 2 * h + q]);
                        d[t] = scaled ? d[t] + v : v;
                    } else {
                        f16 *d = (f16 *)(R + drow[2 * j + h]) + 2 * t + q;
                        *d = f2h(scaled ? h2f(*d) + v : v);
                    }
                }
    return st;
}
int check_runs(const uint8_t *shadow, const int64_t *runs, int n, int64_t base, int64_t wrap) {
    int st = 0;
    for (int i = 0; i < n; i++) {
        int64_t o = (base + runs[2 * i]) & wrap;
        for (int64_t k = 0; k < runs[2 * i + 1]; k++) {
            uint8_t s = shadow[o + k];
            if (!s)
                st |= 1;
            else if (s >= 2)
                st |= 2;
        }
    }
    return st;
}
/* mma.sync m16n8k16 (k8) f16/bf16 -> f32, all register operands */
void mma16816(uint8_t *R, const int32_t *d, const int32_t *a, const int32_t *b, const int32_t *c,
              int ty, int K, int cm) {
    float A[16][16], B[16][8], C[16][8];
    int na = K == 16 ? 4 : 2, nb = K == 16 ? 2 : 1;
    for (int t = 0; t < 32; t++) {
        for (int q = 0; q < na; q++)
            for (int h = 0; h < 2; h++)
                A[(t >> 2) + 8 * (q & 1)][(t & 3) * 2 + h + 8 * (q >> 1)] =
                    ldel(R + a[q] + t * 4 + h * 2, ty);
        for (int q = 0; q < nb; q++)
            for (int h = 0; h < 2; h++)
                B[(t & 3) * 2 + h + 8 * q][t >> 2] = ldel(R + b[q] + t * 4 + h * 2, ty);
        for (int q = 0; q < 4; q++)
            C[(t >> 2) + 8 * (q >> 1)][(t & 3) * 2 + (q & 1)] = ((float *)(R + c[q]))[t];
    }
    for (int r = 0; r < 16; r++)
        for (int n = 0; n < 8; n++) {
            float s = 0;
            for (int k = 0; k < K; k++) s += A[r][k] * B[k][n];
            C[r][n] += s;
        }
    for (int t = 0; t < 32; t++)
        for (int q = 0; q < 4; q++)
            ((float *)(R + d[q]))[t] = C[(t >> 2) + 8 * (q >> 1)][(t & 3) * 2 + (q & 1)];
}
