#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int R;
typedef uint64_t u64;
typedef uint32_t u32;
#define X __attribute__((visibility("default")))
/* ---- hooks into Python ---- */
typedef int64_t (*load_fn)(const void *);
typedef int64_t (*kernel_fn)(int64_t, const char *);
typedef int (*launch_fn)(int64_t, const u32 *, u64,
                         const void *);         /* kernel, info[16], stream, params */
typedef int64_t (*alloc_fn)(int64_t, u64, int); /* addr, bytes, 1=alloc 0=free */
static load_fn g_load;
static kernel_fn g_kernel;
static launch_fn g_launch;
static alloc_fn g_alloc;
static int g_attr[512];
static int g_trace;
X void sim_hooks(load_fn a, kernel_fn b, launch_fn c, alloc_fn d) {
    g_load = a;
    g_kernel = b;
    g_launch = c;
    g_alloc = d;
}
X void sim_set_attr(int i, int v) {
    if (i >= 0 && i < 512) g_attr[i] = v;
}
X void sim_trace(int t) { g_trace = t; }
#define T(...)                                                                                     \
    do {                                                                                           \
        if (g_trace) {                                                                             \
            fprintf(stderr, "[fake cuda] " __VA_ARGS__);                                           \
            fputc('\n', stderr);                                                                   \
        }                                                                                          \
    } while (0)
/* ---- device, context ---- */
static int g_ctx_tag;
static void *g_cur;
#define CTX ((void *)&g_ctx_tag)
X R cuInit(unsigned f) { return 0; }
X R cuDriverGetVersion(int *v) {
    *v = 13000;
    return 0;
}
X R cuDeviceGetCount(int *n) {
    *n = 1;
    return 0;
}
X R cuDeviceGet(int *d, int o) {
    if (o) return 101;
    *d = 0;
    return 0;
}
X R cuDeviceGetName(char *s, int n, int d) {
    snprintf(s, n, "Software GPU");
    return 0;
}
X R cuDeviceGetAttribute(int *v, int a, int d) {
    *v = (a >= 0 && a < 512) ? g_attr[a] : 0;
    T("cuDeviceGetAttribute %d -> %d", a, *v);
    return 0;
}
X R cuDeviceTotalMem_v2(size_t *b, int d) {
    *b = (size_t)80 << 30;
    return 0;
}
X R cuDeviceTotalMem(size_t *b, int d) {
    *b = (size_t)80 << 30;
    return 0;
}
X R cuDeviceComputeCapability(int *a, int *b, int d) {
    *a = g_attr[75];
    *b = g_attr[76];
    return 0;
}
X R cuDeviceGetUuid_v2(char *u, int d) {
    memset(u, 1, 16);
    return 0;
}
X R cuDevicePrimaryCtxRetain(void **c, int d) {
    *c = CTX;
    return 0;
}
X R cuDevicePrimaryCtxRelease_v2(int d) { return 0; }
X R cuDevicePrimaryCtxRelease(int d) { return 0; }
X R cuDevicePrimaryCtxGetState(int d, unsigned *f, int *a) {
    *f = 0;
    *a = 1;
    return 0;
}
X R cuCtxCreate_v2(void **c, unsigned f, int d) {
    *c = g_cur = CTX;
    return 0;
}
X R cuCtxCreate_v3(void **c, void *p, int n, unsigned f, int d) {
    *c = g_cur = CTX;
    return 0;
}
X R cuCtxCreate_v4(void **c, void *p, unsigned f, int d) {
    *c = g_cur = CTX;
    return 0;
}
X R cuCtxDestroy_v2(void *c) { return 0; }
X R cuCtxSetCurrent(void *c) {
    g_cur = c;
    return 0;
}
X R cuCtxGetCurrent(void **c) {
    *c = CTX;
    return 0;
}
X R cuCtxPushCurrent_v2(void *c) { return 0; }
X R cuCtxPopCurrent_v2(void **c) {
    if (c) *c = CTX;
    return 0;
}
X R cuCtxGetDevice(int *d) {
    *d = 0;
    return 0;
}
X R cuCtxSynchronize(void) { return 0; }
X R cuCtxGetApiVersion(void *c, unsigned *v) {
    *v = 13000;
    return 0;
}
/* ---- errors ---- */
X R cuGetErrorName(R e, const char **s) {
    static char b[64];
    snprintf(b, 64, "CUDA_ERROR_%d", e);
    *s = e ? b : "CUDA_SUCCESS";
    return 0;
}
X R cuGetErrorString(R e, const char **s) {
    *s = e ? "error reported by the software GPU's driver" : "no error";
    return 0;
}
/* ---- libraries, modules, kernels ---- */
X R cuLibraryLoadData(void **l, const void *img, void *a, void *b, unsigned n, void *c, void *d,
                      unsigned m) {
    int64_t h = g_load ? g_load(img) : 0;
    T("cuLibraryLoadData -> %ld", (long)h);
    if (!h) return 200;
    *l = (void *)h;
    return 0;
}
X R cuLibraryUnload(void *l) { return 0; }
X R cuLibraryGetKernel(void **k, void *l, const char *n) {
    int64_t h = g_kernel ? g_kernel((int64_t)l, n) : 0;
    T("cuLibraryGetKernel %s -> %ld", n, (long)h);
    if (!h) return 500;
    *k = (void *)h;
    return 0;
}
X R cuLibraryGetModule(void **m, void *l) {
    *m = l;
    return 0;
}
X R cuLibraryGetGlobal(u64 *p, size_t *n, void *l, const char *s) { return 500; }
X R cuLibraryGetManaged(u64 *p, size_t *n, void *l, const char *s) { return 500; }
X R cuLibraryGetUnifiedFunction(void **p, void *l, const char *s) { return 500; }
X R cuLibraryGetKernelCount(unsigned *n, void *l) {
    *n = (unsigned)(g_kernel ? g_kernel((int64_t)l, "") : 0);
    return 0;
}
X R cuLibraryEnumerateKernels(void **k, unsigned n, void *l) {
    for (unsigned i = 0; i < n; i++) {
        char b[16];
        snprintf(b, 16, "#%u", i);
        k[i] = (void *)(g_kernel ? g_kernel((int64_t)l, b) : 0);
    }
    return 0;
}
X R cuModuleLoadData(void **m, const void *img) {
    int64_t h = g_load ? g_load(img) : 0;
    if (!h) return 200;
    *m = (void *)h;
    return 0;
}
X R cuModuleLoadDataEx(void **m, const void *img, unsigned n, void *a, void *b) {
    return cuModuleLoadData(m, img);
}
X R cuModuleGetFunction(void **f, void *m, const char *n) { return cuLibraryGetKernel(f, m, n); }
X R cuModuleUnload(void *m) { return 0; }
X R cuModuleGetLoadingMode(int *m) {
    *m = 1;
    return 0;
}
X R cuKernelGetFunction(void **f, void *k) {
    *f = k;
    return 0;
}
X R cuKernelSetAttribute(int a, int v, void *k, int d) {
    T("cuKernelSetAttribute %d=%d", a, v);
    return (a == 8 && v > g_attr[97]) ? 1 : 0;
}
X R cuFuncSetAttribute(void *f, int a, int v) {
    T("cuFuncSetAttribute %d=%d", a, v);
    return (a == 8 && v > g_attr[97]) ? 1 : 0;
}
X R cuKernelGetAttribute(int *v, int a, void *k, int d) {
    *v = (a == 0) ? 1024 : (a == 4) ? 32 : (a == 8) ? g_attr[97] : 0;
    return 0;
}
X R cuFuncGetAttribute(int *v, int a, void *k) { return cuKernelGetAttribute(v, a, k, 0); }
X R cuFuncSetCacheConfig(void *f, int c) { return 0; }
X R cuFuncLoad(void *f) { return 0; }
X R cuOccupancyAvailableDynamicSMemPerBlock(size_t *s, void *f, int n, int b) {
    *s = (n > 1) ? g_attr[81] / n - 1024 : g_attr[97];
    return 0;
}
X R cuOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
    int r = s ? (int)(g_attr[81] / (s + 1024)) : 32;
    *n = r < 1 ? 1 : r > 32 ? 32 : r;
    return 0;
}
X R cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *n, void *f, int b, size_t s,
                                                         unsigned fl) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, s);
}
struct attr {
    u32 id;
    u32 pad;
    u32 v[16];
};
struct cfg {
    u32 g[3], b[3], smem;
    u64 stream;
    struct attr *a;
    u32 n;
};
static u32 clus(struct attr *a, u32 n, u32 *c) {
    u32 fl = 0;
    c[0] = c[1] = c[2] = 1;
    for (u32 i = 0; i < n; i++) {
        if (a[i].id == 4) {
            c[0] = a[i].v[0];
            c[1] = a[i].v[1];
            c[2] = a[i].v[2];
        }
        if (a[i].id == 6 && a[i].v[0]) fl |= 1;
        if (a[i].id == 2 && a[i].v[0]) fl |= 2;
    }
    for (int k = 0; k < 3; k++)
        if (!c[k]) c[k] = 1;
    return fl;
}
X R cuOccupancyMaxActiveClusters(int *n, void *f, struct cfg *c) {
    u32 d[3];
    clus(c->a, c->n, d);
    int s = d[0] * d[1] * d[2];
    *n = g_attr[16] / (s < 1 ? 1 : s);
    return 0;
}
X R cuOccupancyMaxPotentialClusterSize(int *n, void *f, struct cfg *c) {
    *n = 8;
    return 0;
}
/* ---- launch ---- */
X R sim_launch(void *f, const u32 *g, const u32 *b, u64 smem, u64 stream, struct attr *a, u32 n,
               void **p, void **extra) {
    u32 i[16] = {g[0], g[1], g[2], b[0], b[1], b[2], 0, 0, 0, 0, (u32)smem};
    i[9] = clus(a, n, i + 6);
    T("launch %ld grid %u %u %u block %u %u %u smem %lu", (long)f, g[0], g[1], g[2], b[0], b[1],
      b[2], (unsigned long)smem);
    if (!g[0] || !g[1] || !g[2] || !b[0] || !b[1] || !b[2]) return 1;
    if ((u64)b[0] * b[1] * b[2] > 1024 || smem > (u64)g_attr[97]) return 1;
    for (int k = 0; k < 3; k++)
        if (g[k] % i[6 + k]) return 912;
    if (extra) return 801;
    return g_launch ? g_launch((int64_t)f, i, stream, p) : 0;
}
X R cuLaunchKernel(void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 s, void *st,
                   void **p, void **e) {
    u32 g[3] = {gx, gy, gz}, b[3] = {bx, by, bz};
    return sim_launch(f, g, b, s, (u64)st, 0, 0, p, e);
}
X R cuLaunchKernelEx(struct cfg *c, void *f, void **p, void **e) {
    return sim_launch(f, c->g, c->b, c->smem, c->stream, c->a, c->n, p, e);
}
X R cuLaunchCooperativeKernel(void *f, u32 gx, u32 gy, u32 gz, u32 bx, u32 by, u32 bz, u32 s,
                              void *st, void **p) {
    struct attr a = {2, 0, {1}};
    u32 g[3] = {gx, gy, gz}, b[3] = {bx, by, bz};
    return sim_launch(f, g, b, s, (u64)st, &a, 1, p, 0);
}
/* ---- streams, events ---- */
X R cuStreamCreate(void **s, unsigned f) {
    *s = (void *)0x51;
    return 0;
}
X R cuStreamCreateWithPriority(void **s, unsigned f, int p) {
    *s = (void *)0x51;
    return 0;
}
X R cuStreamDestroy_v2(void *s) { return 0; }
X R cuStreamSynchronize(void *s) { return 0; }
X R cuStreamQuery(void *s) { return 0; }
X R cuStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
X R cuStreamIsCapturing(void *s, int *c) {
    *c = 0;
    return 0;
}
X R cuStreamGetCtx(void *s, void **c) {
    *c = CTX;
    return 0;
}
X R cuEventCreate(void **e, unsigned f) {
    *e = (void *)0xE1;
    return 0;
}
X R cuEventDestroy_v2(void *e) { return 0; }
X R cuEventRecord(void *e, void *s) { return 0; }
X R cuEventRecordWithFlags(void *e, void *s, unsigned f) { return 0; }
X R cuEventSynchronize(void *e) { return 0; }
X R cuEventQuery(void *e) { return 0; }
X R cuEventElapsedTime_v2(float *m, void *a, void *b) {
    *m = 1.f;
    return 0;
}
X R cuEventElapsedTime(float *m, void *a, void *b) {
    *m = 1.f;
    return 0;
}
/* ---- memory: plain host memory ---- */
X R cuMemAlloc_v2(u64 *p, size_t n) {
    void *q = 0;
    if (posix_memalign(&q, 256, (n + 255) & ~(size_t)255)) return 2;
    *p = (u64)q;
    if (g_alloc) g_alloc((int64_t)q, n, 1);
    return 0;
}
X R cuMemFree_v2(u64 p) {
    if (p) {
        if (g_alloc) g_alloc((int64_t)p, 0, 0);
        free((void *)p);
    }
    return 0;
}
X R cuMemAllocAsync(u64 *p, size_t n, void *s) { return cuMemAlloc_v2(p, n); }
X R cuMemFreeAsync(u64 p, void *s) { return cuMemFree_v2(p); }
X R cuMemAllocManaged(u64 *p, size_t n, unsigned f) { return cuMemAlloc_v2(p, n); }
X R cuMemHostAlloc(void **p, size_t n, unsigned f) { return cuMemAlloc_v2((u64 *)p, n); }
X R cuMemFreeHost(void *p) { return cuMemFree_v2((u64)p); }
X R cuMemGetInfo_v2(size_t *f, size_t *t) {
    *f = *t = (size_t)80 << 30;
    return 0;
}
X R cuMemcpyHtoD_v2(u64 d, const void *s, size_t n) {
    memmove((void *)d, s, n);
    return 0;
}
X R cuMemcpyDtoH_v2(void *d, u64 s, size_t n) {
    memmove(d, (void *)s, n);
    return 0;
}
X R cuMemcpyDtoD_v2(u64 d, u64 s, size_t n) {
    memmove((void *)d, (void *)s, n);
    return 0;
}
X R cuMemcpy(u64 d, u64 s, size_t n) {
    memmove((void *)d, (void *)s, n);
    return 0;
}
X R cuMemcpyAsync(u64 d, u64 s, size_t n, void *t) { return cuMemcpy(d, s, n); }
X R cuMemcpyHtoDAsync_v2(u64 d, const void *s, size_t n, void *t) {
    memmove((void *)d, s, n);
    return 0;
}
X R cuMemcpyDtoHAsync_v2(void *d, u64 s, size_t n, void *t) {
    memmove(d, (void *)s, n);
    return 0;
}
X R cuMemcpyDtoDAsync_v2(u64 d, u64 s, size_t n, void *t) {
    memmove((void *)d, (void *)s, n);
    return 0;
}
X R cuMemsetD8_v2(u64 d, unsigned char c, size_t n) {
    memset((void *)d, c, n);
    return 0;
}
X R cuMemsetD8Async(u64 d, unsigned char c, size_t n, void *t) {
    memset((void *)d, c, n);
    return 0;
}
X R cuMemsetD32_v2(u64 d, u32 c, size_t n) {
    for (size_t i = 0; i < n; i++) ((u32 *)d)[i] = c;
    return 0;
}
X R cuMemsetD32Async(u64 d, u32 c, size_t n, void *t) { return cuMemsetD32_v2(d, c, n); }
X R cuPointerGetAttribute(void *v, int a, u64 p) {
    if (a == 2) {
        *(u32 *)v = 2;
        return 0;
    }
    if (a == 1) {
        *(void **)v = CTX;
        return 0;
    }
    if (a == 9) {
        *(int *)v = 0;
        return 0;
    }
    if (a == 3) {
        *(u64 *)v = p;
        return 0;
    }
    return 1;
}
X R cuProfilerStart(void) { return 0; }
X R cuProfilerStop(void) { return 0; }
/* ---- tensor maps: the 64 bytes CuTe DSL host code writes itself (see tma.py), so there is one
 * form to decode ---- */
/* driver element type -> type field of the map */
static const int etype[16] = {0, 1, 2, 2, 4, 5, 6, 7, 9, 10, 7, 11, 11, 0, 0, 0};
static const int esize[16] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 0, 0, 0};
static char g_tmerr[256];
X const char *sim_tmap_error(void) { return g_tmerr; }
#define BAD(...)                                                                                   \
    do {                                                                                           \
        snprintf(g_tmerr, sizeof g_tmerr, __VA_ARGS__);                                            \
        T("tensor map refused: %s", g_tmerr);                                                      \
        return 1;                                                                                  \
    } while (0)
X R cuTensorMapEncodeTiled(void *out, int dt, u32 rank, void *addr, const u64 *dim, const u64 *str,
                           const u32 *box, const u32 *es, int inter, int swz, int l2, int oob) {
    u64 w[16] = {0};
    int e = esize[dt & 15];
    if ((u64)out & 63) BAD("the tensor map is not 64-byte aligned");
    if (!e) BAD("element type %d is not supported", dt);
    if (rank < 1 || rank > 5) BAD("rank %u", rank);
    if ((u64)addr & (inter == 2 ? 31 : 15)) BAD("global address %p is not 16-byte aligned", addr);
    if (!addr) BAD("global address is null");
    if (inter && rank < 3) BAD("interleave needs rank >= 3");
    for (u32 i = 0; i < rank; i++) {
        if (!dim[i] || dim[i] > ((u64)1 << 32)) BAD("globalDim[%u]=%lu", i, (unsigned long)dim[i]);
        if (!box[i] || box[i] > 256) BAD("boxDim[%u]=%u", i, box[i]);
        if (!es[i] || es[i] > 8) BAD("elementStrides[%u]=%u", i, es[i]);
        if (i + 1 < rank && ((str[i] & (inter == 2 ? 31 : 15)) || str[i] >= ((u64)1 << 40)))
            BAD("globalStrides[%u]=%lu bytes", i, (unsigned long)str[i]);
    }
    u64 inner = (u64)box[0] * e;
    if (!inter && (inner & 15)) BAD("inner box of %lu bytes", (unsigned long)inner);
    static const int sb[7] = {0, 32, 64, 128, 128, 128, 128};
    if (swz < 0 || swz > 3) BAD("swizzle mode %d is not modelled", swz);
    if (!inter && swz && inner > (u64)sb[swz])
        BAD("inner box of %lu bytes exceeds the %d-byte swizzle", (unsigned long)inner, sb[swz]);
    u64 ext = inner;
    for (u32 i = 1; i < rank; i++) ext += (dim[i] - 1) * str[i - 1];
    w[0] = (u64)addr;
    w[1] = 2 | (u64)(rank - 1) << 4 | (u64)etype[dt] << 7 | (u64)(inter & 3) << 11 |
           (u64)swz << 13 | (u64)(oob & 1) << 15 | (u64)(l2 & 3) << 17 | (u64)(ext >= 131072) << 21;
    for (u32 i = 0; i + 1 < rank; i++) {
        u64 q = str[i] >> 4;
        ((u32 *)w)[3 + i] = (u32)q;
        w[3] |= ((q >> 32) & 15) << (32 + 4 * i);
    }
    for (u32 i = 0; i < rank; i++) {
        ((u32 *)w)[8 + i] = (u32)(dim[i] - 1);
        w[6] |= (u64)(es[i] - 1) << (32 + 3 * i);
        ((uint8_t *)w)[55 + i] = box[i] - 1;
    }
    memcpy(out, w, 128);
    T("cuTensorMapEncodeTiled rank %u addr %p", rank, addr);
    return 0;
}
X R cuTensorMapEncodeIm2col(void *out) { return 801; }
X R cuTensorMapEncodeIm2colWide(void *out) { return 801; }
X R cuTensorMapReplaceAddress(void *m, void *a) {
    if ((u64)a & 15) return 1;
    *(u64 *)m = (u64)a;
    return 0;
}
/* ---- entry points by name ---- */
X R cuGetExportTable(const void **t, const void *id) { return 500; }
static void *self(void) {
    static void *h;
    if (!h) {
        Dl_info i;
        dladdr((void *)&cuInit, &i);
        h = dlopen(i.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    }
    return h;
}
static void *find(const char *s, int ver) {
    char b[160];
    void *p;
    if (!strcmp(s, "cuCtxCreate")) s = ver >= 13000 ? "cuCtxCreate_v4" : "cuCtxCreate_v2";
    if ((p = dlsym(self(), s))) return p;
    snprintf(b, 160, "%s_v2", s);
    if ((p = dlsym(self(), b))) return p;
    size_t n = strlen(s);
    if (n > 5 && !strcmp(s + n - 5, "_ptsz")) {
        snprintf(b, 160, "%.*s", (int)(n - 5), s);
        return find(b, ver);
    }
    return 0;
}
X R cuGetProcAddress_v2(const char *s, void **p, int ver, u64 fl, int *st);
X R cuGetProcAddress(const char *s, void **p, int ver, u64 fl) {
    return cuGetProcAddress_v2(s, p, ver, fl, 0);
}
X R cuGetProcAddress_v2(const char *s, void **p, int ver, u64 fl, int *st) {
    if (!strcmp(s, "cuGetProcAddress"))
        *p = (void *)cuGetProcAddress_v2;
    else
        *p = find(s, ver);
    if (!*p) {
        if (g_trace > 1) T("no entry point %s", s);
        if (st) *st = 1;
        return 500;
    }
    if (st) *st = 0;
    return 0;
}
