"""Small SIMT kernels in CuTe DSL for small_kernels.py."""

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor


class Softmax:
    """y = softmax(x) and total += sum of squares of y: a block per row, threads stride over it."""

    def __init__(self, threads):
        self.threads = threads

    @cute.jit
    def __call__(self, x: cute.Tensor, y: cute.Tensor, total: cute.Tensor, stream):
        self.k(x, y, total).launch(
            grid=(x.shape[0], 1, 1), block=(self.threads, 1, 1), stream=stream
        )

    @cute.jit
    def reduce(self, v: Float32, s: cute.Tensor, is_max: cutlass.Constexpr) -> Float32:
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(5):
            o = cute.arch.shuffle_sync_bfly(v, offset=1 << i)
            v = cute.arch.fmax(v, o) if cutlass.const_expr(is_max) else v + o
        cute.arch.sync_threads()
        if tid % 32 == 0:
            s[tid // 32] = v
        cute.arch.sync_threads()
        r = s[0]
        for i in cutlass.range_constexpr(1, self.threads // 32):
            r = cute.arch.fmax(r, s[i]) if cutlass.const_expr(is_max) else r + s[i]
        return r

    @cute.kernel
    def k(self, x: cute.Tensor, y: cute.Tensor, total: cute.Tensor):
        tid, _, _ = cute.arch.thread_idx()
        row, _, _ = cute.arch.block_idx()
        s = cutlass.memory.SmemAllocator().allocate_tensor(Float32, cute.make_layout(32), 16)
        n = x.shape[1]
        m = Float32(-1e30)
        for j in cutlass.range(tid, n, self.threads):
            m = cute.arch.fmax(m, x[row, j].to(Float32))
        m = self.reduce(m, s, True)
        t = Float32(0.0)
        for j in cutlass.range(tid, n, self.threads):
            t += cute.math.exp(x[row, j].to(Float32) - m)
        t = self.reduce(t, s, False)
        sq = Float32(0.0)
        for j in cutlass.range(tid, n, self.threads):
            v = cute.math.exp(x[row, j].to(Float32) - m) / t
            y[row, j] = v.to(y.element_type)
            sq += v * v
        sq = self.reduce(sq, s, False)
        if tid == 0:
            cute.arch.atomic_add(
                total.iterator.llvm_ptr if hasattr(total.iterator, "llvm_ptr") else total.iterator,
                sq,
            )


def check(cute_, software_gpu):
    def T(dt, r):
        return make_fake_tensor(
            dt,
            tuple(cute.sym_int() for _ in range(r)),
            tuple(cute.sym_int64() for _ in range(r - 1)) + (1,),
            assumed_align=dt.width // 8,
        )

    for threads in (32, 96, 256):
        f = cute.compile(
            Softmax(threads),
            T(cutlass.BFloat16, 2),
            T(Float32, 2),
            T(Float32, 1),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
        x, y, t = torch.randn(5, 333).bfloat16(), torch.zeros(5, 333), torch.zeros(1)
        for delay in (None, 1):
            software_gpu.OPTIONS["delay"] = delay
            y.zero_(), t.zero_()
            f(x, y, t)
            ref = torch.softmax(x.float(), -1)
            assert (y - ref).abs().max() < 1e-7 * 50, (y - ref).abs().max()
            assert abs(t.item() - ref.pow(2).sum().item()) < 1e-6
            assert not f.last["warnings"], f.last["warnings"]
    print("softmax ok", f.last)
