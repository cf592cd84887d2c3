"""Calls a compiled kernel under the fake driver and looks at what is recorded: `... ARCH`."""

import os
import sys


def _maps(tma, launch):
    return [tma.decode(p) for p in launch.params if len(p) == 128]


def check_launch(arch):
    from software_gpu import device_memory, driver, tma

    driver.install(arch)
    import cutlass
    import cutlass.cute as cute
    import torch
    from cutlass.cute.runtime import make_fake_stream

    if arch == "sm_90a":
        import attention_sm90 as s

        k = s.Attn90(False)
    else:
        import attention_sm100 as s

        k = s.Attn100()
    texts = driver.capture_ptx()
    c = cute.compile(
        k,
        *[s.T(cutlass.BFloat16) for _ in range(4)],
        make_fake_stream(use_tvm_ffi_env_stream=True),
        options="--enable-tvm-ffi",
    )
    # rows of 72 elements of which 64 are used: the stride must show in the maps
    q, kk, v, o = [torch.randn(n, 72).to(torch.bfloat16)[:, :64] for n in (256, 384, 384, 256)]
    c(*[device_memory.as_cuda(x) for x in (q, kk, v, o)])
    launches = driver.take_launches()
    assert len(launches) == 1
    first = launches[0]
    assert (
        first.name in texts
        and first.ptx == c.__ptx__
        and first.grid == (2, 1, 1)
        and first.cluster == (1, 1, 1)
    )
    assert first.block == ((384, 1, 1) if arch == "sm_90a" else (192, 1, 1))
    assert first.smem_bytes == (99328 if arch == "sm_90a" else 83968)
    for m, t in zip(_maps(tma, first), (q, kk, v, o), strict=False):
        assert (m.addr, m.dtype, m.dims, m.strides, m.box, m.swizzle) == (
            t.data_ptr(),
            "bf16",
            (64, t.shape[0]),
            (2, 144),
            (64, 128),
            128,
        )
    assert len(_maps(tma, first)) == (4 if arch == "sm_90a" else 3)
    assert (
        len(device_memory.allocations()) == 4
        and device_memory.allocations()[0][2].nbytes == device_memory.allocations()[0][1]
    )
    # cuTensorMapEncodeTiled writes what CuTe's own host code wrote, and refuses what drivers refuse
    import ctypes

    lib = driver.install(arch)
    buf = (ctypes.c_uint8 * 256)()
    out = ctypes.addressof(buf) + (-ctypes.addressof(buf)) % 128

    def enc(t, stride, box, swizzle=3):
        u64, u32 = ctypes.c_uint64, ctypes.c_uint32
        return lib.cuTensorMapEncodeTiled(
            ctypes.c_void_p(out),
            9,
            2,
            ctypes.c_void_p(t.data_ptr()),
            (u64 * 2)(64, t.shape[0]),
            (u64 * 1)(stride),
            (u32 * 2)(*box),
            (u32 * 2)(1, 1),
            0,
            swizzle,
            2,
            0,
        )

    assert enc(q, 144, (64, 128)) == 0
    mine = [p for p in first.params if len(p) == 128][0]
    assert ctypes.string_at(out, 64) == mine[:64], (
        ctypes.string_at(out, 64).hex(),
        mine[:64].hex(),
    )
    assert (
        enc(q, 136, (64, 128)) == 1 and enc(q, 144, (128, 128)) == 1 and enc(q, 144, (64, 257)) == 1
    )
    print(
        "launch",
        arch,
        "ok:",
        first.grid,
        first.block,
        first.smem_bytes,
        [len(p) for p in first.params],
    )
    try:  # a tensor with a bad stride is refused by name, and nothing is launched
        c(
            *[
                device_memory.as_cuda(x)
                for x in (torch.zeros(256, 65, dtype=torch.bfloat16)[:, :64], kk, v, o)
            ]
        )
        raise SystemExit("bad stride accepted")
    except ValueError as e:
        assert "strides" in str(e) or "divisib" in str(e), e
    assert not driver.take_launches()
    # extents follow the tensors' lives; a launch keeps its tensors
    c(
        device_memory.as_cuda(torch.zeros(256, 64, dtype=torch.bfloat16)),
        *[device_memory.as_cuda(x) for x in (kk, v, o)],
    )
    held = driver.take_launches()
    n = len(device_memory.allocations())
    held.clear()
    assert len(device_memory.allocations()) == n - 1
    # an exported and reloaded object behaves the same
    import tempfile

    with tempfile.TemporaryDirectory() as tmp:
        c.export_to_c(
            os.path.join(tmp, "k.o"), function_name="k_fn", export_only_tvm_ffi_symbols=False
        )
        f = cute.runtime.load_module(os.path.join(tmp, "k.o"), enable_tvm_ffi=True).k_fn
        f(*[device_memory.as_cuda(x) for x in (q, kk, v, o)])
    l2 = driver.take_launches()[0]
    assert (l2.name, l2.grid, l2.smem_bytes, l2.ptx) == (
        first.name,
        first.grid,
        first.smem_bytes,
        first.ptx,
    )
    # without TVM-FFI: cute tensors made from the wrapped tensors
    import cuda.bindings.driver as cuda
    from cutlass.cute.runtime import from_dlpack

    args = [
        from_dlpack(device_memory.as_cuda(x), assumed_align=16).mark_layout_dynamic(leading_dim=1)
        for x in (q, kk, v, o)
    ]
    plain = cute.compile(k, *args, cuda.CUstream(0))
    plain(*args, cuda.CUstream(0))
    l3 = driver.take_launches()[0]
    assert l3.grid == first.grid and l3.smem_bytes == first.smem_bytes
    assert [tma.decode(p) for p in l3.params if len(p) == 128] == [
        tma.decode(p) for p in first.params if len(p) == 128
    ]


if __name__ == "__main__":
    check_launch(sys.argv[1])
