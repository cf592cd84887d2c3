/* What compiled CuTe DSL host code calls: thin names over the fake driver. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
typedef int R;
typedef uint64_t u64;
typedef uint32_t u32;
#define X __attribute__((visibility("default")))
extern R sim_launch(void *, const u32 *, const u32 *, u64, u64, void *, u32, void **, void **);
extern R cuLibraryLoadData(void **, const void *, void *, void *, unsigned, void *, void *,
                           unsigned),
    cuLibraryGetKernel(void **, void *, const char *), cuDeviceGetAttribute(int *, int, int),
    cuKernelSetAttribute(int, int, void *, int), cuMemAlloc_v2(u64 *, size_t), cuMemFree_v2(u64),
    cuOccupancyMaxActiveBlocksPerMultiprocessor(int *, void *, int, size_t),
    cuKernelGetAttribute(int *, int, void *, int), cuLibraryGetKernelCount(unsigned *, void *),
    cuTensorMapEncodeTiled(void *, int, u32, void *, const u64 *, const u64 *, const u32 *,
                           const u32 *, int, int, int, int),
    cuTensorMapReplaceAddress(void *, void *);
extern const char *sim_tmap_error(void);
struct rcfg {
    u32 g[3], b[3];
    u64 smem, stream;
    void *a;
    u32 n;
};
X R _cudaLaunchKernelEx(struct rcfg *c, void *f, void **p) {
    return sim_launch(f, c->g, c->b, c->smem, c->stream, c->a, c->n, p, 0);
}
X R _cudaLibraryLoadData(void **l, const void *img, void *a, void *b, unsigned n, void *c, void *d,
                         unsigned m) {
    return cuLibraryLoadData(l, img, a, b, n, c, d, m);
}
X R _cuLibraryLoadData(void **l, const void *img, void *a, void *b, unsigned n, void *c, void *d,
                       unsigned m) {
    return cuLibraryLoadData(l, img, a, b, n, c, d, m);
}
X R _cudaLibraryLoadFromFile(void **l, const char *f) { return 801; }
X R _cuLibraryLoadFromFile(void **l, const char *f) { return 801; }
X R _cudaLibraryUnload(void *l) { return 0; }
X R _cuLibraryUnload(void *l) { return 0; }
X R _cudaLibraryGetKernel(void **k, void *l, const char *n) { return cuLibraryGetKernel(k, l, n); }
X R _cuLibraryGetKernel(void **k, void *l, const char *n) { return cuLibraryGetKernel(k, l, n); }
X R _cudaLibraryGetKernelCount(unsigned *n, void *l) { return cuLibraryGetKernelCount(n, l); }
X R _cuLibraryGetKernelCount(unsigned *n, void *l) { return cuLibraryGetKernelCount(n, l); }
X R _cuLibraryGetModule(void **m, void *l) {
    *m = l;
    return 0;
}
X R _cudaLibraryGetGlobal(void **p, size_t *n, void *l, const char *s) { return 500; }
X R _cuLibraryGetGlobal(void **p, size_t *n, void *l, const char *s) { return 500; }
X R _cudaLibraryGetManaged(void **p, size_t *n, void *l, const char *s) { return 500; }
X R _cuLibraryGetManaged(void **p, size_t *n, void *l, const char *s) { return 500; }
X R _cudaLibraryGetUnifiedFunction(void **p, void *l, const char *s) { return 500; }
X R _cuLibraryGetUnifiedFunction(void **p, void *l, const char *s) { return 500; }
X R _cuKernelGetAttribute(int *v, int a, void *k, int d) {
    return cuKernelGetAttribute(v, a, k, d);
}
X R _cudaFuncSetAttribute(void *f, int a, int v) { return cuKernelSetAttribute(a, v, f, 0); }
X R _cudaKernelSetAttributeForDevice(void *f, int a, int v, int d) {
    return cuKernelSetAttribute(a, v, f, d);
}
X R _cudaGetDevice(int *d) {
    *d = 0;
    return 0;
}
X R _cudaSetDevice(int d) { return d ? 101 : 0; }
X R _cudaGetDeviceCount(int *n) {
    *n = 1;
    return 0;
}
X R _cuDeviceGet(int *d, int o) {
    *d = 0;
    return 0;
}
X R _cudaDeviceGetAttribute(int *v, int a, int d) { return cuDeviceGetAttribute(v, a, d); }
X R _cudaDeviceSynchronize(void) { return 0; }
X R _cudaGetLastError(void) { return 0; }
X R _cudaGetDeviceProperties(void *p, int d) { return 801; }
X R _cudaMalloc(void **p, size_t n) { return cuMemAlloc_v2((u64 *)p, n); }
X R _cudaFree(void *p) { return cuMemFree_v2((u64)p); }
X R _cudaMallocAsync(void **p, size_t n, void *s) { return cuMemAlloc_v2((u64 *)p, n); }
X R _cudaFreeAsync(void *p, void *s) { return cuMemFree_v2((u64)p); }
X R _cudaMallocHost(void **p, size_t n) { return cuMemAlloc_v2((u64 *)p, n); }
X R _cudaFreeHost(void *p) { return cuMemFree_v2((u64)p); }
X R _cudaMallocManaged(void **p, size_t n, unsigned f) { return cuMemAlloc_v2((u64 *)p, n); }
X R _cudaMemcpy(void *d, const void *s, size_t n, int k) {
    memmove(d, s, n);
    return 0;
}
X R _cudaMemcpyAsync(void *d, const void *s, size_t n, int k, void *t) {
    memmove(d, s, n);
    return 0;
}
X R _cudaMemset(void *d, int c, size_t n) {
    memset(d, c, n);
    return 0;
}
X R _cudaMemsetAsync(void *d, int c, size_t n, void *t) {
    memset(d, c, n);
    return 0;
}
X R _cudaStreamCreate(void **s) {
    *s = (void *)0x51;
    return 0;
}
X R _cudaStreamDestroy(void *s) { return 0; }
X R _cudaStreamSynchronize(void *s) { return 0; }
X R _cudaStreamWaitEvent(void *s, void *e, unsigned f) { return 0; }
X R _cudaEventCreate(void **e) {
    *e = (void *)0xE1;
    return 0;
}
X R _cudaEventDestroy(void *e) { return 0; }
X R _cudaEventRecord(void *e, void *s) { return 0; }
X R _cudaEventElapsedTime(float *m, void *a, void *b) {
    *m = 1.f;
    return 0;
}
X R _cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t s) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessor(n, f, b, s);
}
X R _cudaProfilerStart(void) { return 0; }
X R _cudaProfilerStop(void) { return 0; }
X R _cudaStreamAddCallback(void) { return 801; }
X R _cudaStreamBeginCapture(void) { return 801; }
X R _cudaStreamEndCapture(void) { return 801; }
X R _cudaGraphInstantiate(void) { return 801; }
X R _cudaGraphLaunch(void) { return 801; }
X R _cudaGraphExecDestroy(void) { return 0; }
X R _cudaGraphDestroy(void) { return 0; }
X R _cuTensorMapEncodeTiled(void *o, int dt, u32 r, void *a, const u64 *d, const u64 *s,
                            const u32 *b, const u32 *e, int i, int w, int l, int f) {
    return cuTensorMapEncodeTiled(o, dt, r, a, d, s, b, e, i, w, l, f);
}
X R _cuTensorMapReplaceAddress(void *m, void *a) { return cuTensorMapReplaceAddress(m, a); }
static char g_msg[512];
static const char *msg(R e) {
    if (e == 1 && sim_tmap_error()[0])
        snprintf(g_msg, 512, "CUDA Error Code: 1 (invalid value; last refused tensor map: %s)",
                 sim_tmap_error());
    else
        snprintf(g_msg, 512,
                 "CUDA Error Code: %d (software GPU; its own errors are raised by driver.check())",
                 e);
    return g_msg;
}
X const char *cuda_dialect_get_error_name(R e) { return msg(e); }
X void cuda_dialect_print_on_error(R e) {
    if (e) fprintf(stderr, "%s\n", msg(e));
}
X void cuda_dialect_assert_success(R e) {
    if (e) {
        fprintf(stderr, "%s\n", msg(e));
        abort();
    }
}
X int cuda_dialect_init_library_once(void **state, R (*init)(void **), R (*perdev)(void **, int),
                                     void (*err)(const char *, const char *)) {
    if (*state) return 0;
    void *l = 0;
    R r = init(&l);
    if (!r && perdev) r = perdev(&l, 0);
    if (r) {
        if (err) err("RuntimeError", msg(r));
        return -1;
    }
    *state = l;
    return 0;
}
X void cuda_dialect_unload_library_once(void **state) { *state = 0; }
typedef void (*raise_fn)(const char *, const char **, int);
X void CuteDSLRT_TVMFFISetRaisedCudaError(raise_fn f, R e) {
    if (f) {
        const char *p[1] = {msg(e)};
        f("CUDADialectError", p, 1);
    }
}
X void CuteDSLRT_TVMFFISetRaisedCudaLaunchError(raise_fn f, R e) {
    if (f) {
        const char *p[1] = {msg(e)};
        f("CUDADialectError", p, 1);
    }
}
X const char *CuteDSLRT_GetErrorName(int e) { return "CuteDSLRT error"; }
X const char *CuteDSLRT_GetErrorString(int e) { return "CuteDSLRT error"; }
