"""Runs a small kernel of CuTe DSL against torch: small_kernels.py attention|softmax|host ARCH"""

import sys


def attention(arch):
    import software_gpu

    cute = software_gpu.activate(arch)
    import cutlass
    import torch
    from cutlass.cute.runtime import make_fake_stream

    if arch == "sm_90a":
        import attention_sm90 as s

        kernels = [(s.Attn90(False), torch.bfloat16), (s.Attn90(True), torch.float32)]
    else:
        import attention_sm100 as s

        kernels = [(s.Attn100(), torch.bfloat16)]
    b = cutlass.BFloat16
    for k, dt in kernels:
        f = cute.compile(
            k,
            s.T(b),
            s.T(b),
            s.T(b),
            s.T(b if dt == torch.bfloat16 else cutlass.Float32),
            make_fake_stream(use_tvm_ffi_env_stream=True),
            options="--enable-tvm-ffi",
        )
        torch.manual_seed(0)
        q, kk, v = [(0.3 * torch.randn(n, 72)).to(torch.bfloat16)[:, :64] for n in (256, 384, 384)]
        o = torch.zeros(256, 64, dtype=dt)
        ref = torch.exp2(q.float() @ kk.float().T).to(torch.bfloat16).float() @ v.float()
        for delay in (None, 1, 2):
            software_gpu.OPTIONS["delay"] = delay
            o.zero_()
            f(q, kk, v, o)
            err = (o.float() - ref).abs().max().item()
            assert err < (0.07 if dt == torch.bfloat16 else 2e-5), err
            assert not f.last["warnings"], f.last["warnings"]


def softmax(arch):
    """SIMT kernels: vectorised loads, predication, shuffles, shared memory reduction, atomics"""
    import software_gpu

    cute = software_gpu.activate(arch)
    import softmax_simt

    softmax_simt.check(cute, software_gpu)


def host(arch):
    """A function without kernels runs on CPU tensors as it is, also after a second `activate`,
    which changes nothing; kernels compiled after that run once."""
    import software_gpu

    software_gpu.activate(arch)
    cute = software_gpu.activate(arch)
    import cutlass
    import softmax_simt
    import torch
    from cutlass.cute.runtime import make_fake_tensor

    @cute.jit
    def double(x: cute.Tensor):
        for i in range(cute.size(x)):
            x[i] = x[i] * 2

    space = cutlass.AddressSpace.generic
    fake = make_fake_tensor(cutlass.Int32, (cute.sym_int(),), (1,), memspace=space, assumed_align=4)
    x = torch.arange(5, dtype=torch.int32)
    cute.compile(double, fake, options="--enable-tvm-ffi")(x)
    assert x.tolist() == [0, 2, 4, 6, 8] and not software_gpu.RESULTS
    softmax_simt.check(cute, software_gpu)


if __name__ == "__main__":
    {"attention": attention, "softmax": softmax, "host": host}[sys.argv[1]](sys.argv[2])
