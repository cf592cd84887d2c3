"""python -m bench.learned [PATTERN ...]: backwards with gradients of tables that a score_mod reads.

A case is a mod written in torch, with learned tables, at a length and a head dimension. In one run,
in turns:

learned            the backward, with the gradients of the tables
detached           that of the same mod whose tables need no gradient
learned_in_order   `learned` with deterministic=True, where that is accepted
detached_in_order  `detached` with deterministic=True
torch              torch.compile(flex_attention), with the gradients of the tables
cuequivariance     cuequivariance_torch.triangle_attention, of triangle cases

A triangle case is attention of the rows of a pair representation: a bias of heads, queries and keys
that all rows share, and a mask of keys for each row.

Nothing is timed before the gradients of the tables are right: at a short length, against attention
in float64. A row is a line of JSON in --out. `--dry` checks every case, small and on the CPU, and
times nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench import Json, say, timing
from bench.by_name import Bench
from bench.oracle import attend

TOKENS, SHORT = 32768, 300
OTHERS = ("torch", "cuequivariance")
PEERS = ("learned", "detached", "learned_in_order", "detached_in_order", *OTHERS)
# Of the gradient of a table by bf16 against float64, as a share of its largest value.
TABLE_ERROR = 0.03
BUCKETS = 32


@dataclass(frozen=True)
class Case:
    """reads: of `MODS`. heads_kv: 0 for as many as heads. batch: 0 for as many as have TOKENS."""

    reads: str
    n: int
    causal: bool = False
    d: int = 128
    heads: int = 16
    heads_kv: int = 0
    batch: int = 0

    @property
    def masks_keys(self) -> bool:
        return self.reads == "triangle"

    @property
    def name(self) -> str:
        group = f"-kv{self.heads_kv}" if self.heads_kv else ""
        mask = "causal" if self.causal else "full"
        return f"learned-{self.reads}-{mask}-n{self.n}-d{self.d}{group}"


def _slopes(n: int, slopes: Any) -> Any:
    """Of either sign, a slope would let queries see the farthest keys alone: then scores have no
    gradient but rounding."""
    return lambda s, b, h, q, k: s - slopes[h].abs() * (q - k).abs()


def _gains(n: int, gains: Any) -> Any:
    return lambda s, b, h, q, k: s * gains[h]


def _keys(n: int, bias: Any) -> Any:
    return lambda s, b, h, q, k: s + bias[h, k]


def _queries(n: int, gains: Any) -> Any:
    return lambda s, b, h, q, k: s * gains[h, q]


def _distance(n: int, table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, (q - k).clamp(-128, 128) + 128]


def _bucket(distance: Any) -> Any:
    """T5's: the near ones by themselves, the far ones by the logarithm; 16 for each sign."""
    size = distance.abs()
    far = 8 + (size.clamp(min=1).float() / 8).log2().mul(1.6).int().clamp(min=0, max=7)
    near = size < 8
    return near * size + ~near * far + 16 * (distance > 0)


def _t5(n: int, table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, _bucket(q - k)]


def _axial(n: int, rows: Any, cols: Any) -> Any:
    side = max(int(n**0.5), 1)
    return lambda s, b, h, q, k: (
        s + rows[h, _bucket(q // side - k // side)] + cols[h, _bucket(q % side - k % side)]
    )


def _pairs(n: int, bias: Any) -> Any:
    return lambda s, b, h, q, k: s + bias[h, q, k]


# The mod made of tables, and the shapes of these, of heads and length.
MODS: dict[str, tuple[Callable[..., Any], Callable[[int, int], list[tuple[int, ...]]]]] = {
    "slopes": (_slopes, lambda h, n: [(h,)]),
    "gains": (_gains, lambda h, n: [(h,)]),
    "keys": (_keys, lambda h, n: [(h, n)]),
    "queries": (_queries, lambda h, n: [(h, n)]),
    "distance": (_distance, lambda h, n: [(h, 257)]),
    "t5": (_t5, lambda h, n: [(h, BUCKETS)]),
    "axial": (_axial, lambda h, n: [(h, BUCKETS), (h, BUCKETS)]),
    "pairs": (_pairs, lambda h, n: [(h, n, n)]),
    "triangle": (_pairs, lambda h, n: [(h, n, n)]),
}


def all_cases() -> list[Case]:
    found = [
        Case(name, n, causal)
        for name in MODS
        if name != "triangle"
        for n in (8192, 2048)
        for causal in (False, True)
    ]
    found += [Case("triangle", n, d=32, heads=4, batch=384) for n in (384, 256, 768)]
    found += [Case(name, 8192, d=64) for name in ("slopes", "t5")]
    found += [Case(name, 8192, causal=True, heads=32, heads_kv=8) for name in ("slopes", "keys")]
    return found


class Problem:
    """Tensors of a case; n: the length, if it is another one."""

    def __init__(self, case: Case, device: str, dtype: Any, n: int = 0) -> None:
        import torch

        self.case, self.n = case, n or case.n
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, device=device, generator=generator)
        batch = (case.batch or max(1, TOKENS // self.n)) if n == 0 else 2
        heads = case.heads, case.heads_kv or case.heads, case.heads_kv or case.heads
        self.q, self.k, self.v = (
            draw(batch, self.n, count, case.d).to(dtype).requires_grad_() for count in heads
        )
        self.dout = draw(self.q.shape).to(dtype)
        _, shapes = MODS[case.reads]
        self.tables = [0.5 * draw(shape) for shape in shapes(case.heads, self.n)]
        self.valid = draw(batch, self.n) > -1.5 if case.masks_keys else None

    def mod(self, tables: list[Any]) -> Any:
        return MODS[self.case.reads][0](self.n, *tables)

    def backward_of(self, peer: str) -> Callable[[], Any]:
        """Runs a backward; returns the gradients of q, k, v, and of the tables if it has them."""
        import torch

        tables = [x.clone().requires_grad_(not peer.startswith("detached")) for x in self.tables]
        leaves = [self.q, self.k, self.v, *(x for x in tables if x.requires_grad)]
        attend = {"torch": self._torch, "cuequivariance": self._cuequivariance}
        out = attend.get(peer, self._ours)(tables, peer)
        return partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)

    def _ours(self, tables: list[Any], peer: str) -> Any:
        from flash_mask_cute import flash_attn_func

        return flash_attn_func(
            self.q, self.k, self.v, causal=self.case.causal, score_mod=self.mod(tables),
            deterministic=peer.endswith("in_order"), mask_mod=self._mask_mod(),
        )  # fmt: skip

    def _mask_mod(self) -> Any:
        valid = self.valid
        return None if valid is None else lambda b, h, q, k: valid[b, k]

    def _torch(self, tables: list[Any], peer: str) -> Any:
        import torch
        from torch.nn.attention import flex_attention as flex

        torch._dynamo.reset()
        mask = None
        if self.case.causal:
            sizes = self.n, self.n, str(self.q.device)
            mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, *sizes)
        elif (mask_mod := self._mask_mod()) is not None:
            sizes = self.n, self.n, str(self.q.device)
            mask = flex.create_block_mask(mask_mod, self.q.shape[0], None, *sizes)
        attend: Any = torch.compile(flex.flex_attention, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        options = {"score_mod": self.mod(tables), "block_mask": mask, "enable_gqa": True}
        return attend(q, k, v, **options).transpose(1, 2)

    def _cuequivariance(self, tables: list[Any], peer: str) -> Any:
        module = importlib.import_module("cuequivariance_torch")
        assert self.valid is not None
        q, k, v = (x.transpose(1, 2)[None] for x in (self.q, self.k, self.v))
        mask = self.valid[None, :, None, None, :]
        return module.triangle_attention(q, k, v, tables[0][None, None], mask)[0].transpose(1, 2)

    def table_gradients(self) -> list[Any]:
        """In float64, by autograd."""
        import torch

        tables = [x.double().requires_grad_() for x in self.tables]
        mod, place = self.mod(tables), torch.arange(self.n, device=self.q.device)
        q, k, v, dout = (x.detach().double() for x in (self.q, self.k, self.v, self.dout))
        hidden = place > place[:, None]
        total = torch.zeros((), dtype=torch.float64, device=self.q.device)
        for b in range(q.shape[0]):
            for h in range(q.shape[2]):
                of_kv = h * k.shape[2] // q.shape[2]
                scores = q[b, :, h] @ k[b, :, of_kv].T * self.case.d**-0.5
                head = torch.tensor(h, device=self.q.device)
                scores = mod(scores, torch.tensor(b), head, place[:, None], place)
                if self.case.causal:
                    scores = scores.masked_fill(hidden, -torch.inf)
                if self.valid is not None:
                    scores = scores.masked_fill(~self.valid[b], -torch.inf)
                total = total + (attend(scores, v[b, :, of_kv]).out * dout[b, :, h]).sum()
        return list(torch.autograd.grad(total, tables))

    def check(self, peer: str, expected: list[Any]) -> float:
        """The largest error of a table's gradient. Raises ValueError."""
        worst = 0.0
        found = self.backward_of(peer)()[3:]
        for ours, right in zip(found, expected, strict=True):
            worst = max(worst, float((ours - right).abs().max() / right.abs().max()))
        if not worst < TABLE_ERROR:
            raise ValueError(f"{peer}: the gradient of a table is off by {worst:.3g}")
        return worst


def is_accepted(problem: Problem, peer: str) -> bool:
    """Whether ours has an order of sums for this case."""
    try:
        problem.backward_of(peer)
    except NotImplementedError:
        return False
    return True


def others_of(case: Case) -> Iterator[str]:
    """Other libraries that compute the case."""
    yield "torch"
    if case.masks_keys and importlib.util.find_spec("cuequivariance_torch") is not None:
        yield "cuequivariance"


def check_case(case: Case, device: str, dtype: Any) -> tuple[list[str], str]:
    """The peers that take part, and what they are off by. Raises ValueError where ours is wrong."""
    short = Problem(case, device, dtype, SHORT if device == "cuda" else 40)
    expected = short.table_gradients()
    peers = [x for x in PEERS if x not in OTHERS and is_accepted(short, x)]
    told = [f"{x} {short.check(x, expected):.1e}" for x in peers if x.startswith("learned")]
    for other in others_of(case) if device == "cuda" else ():
        try:
            told.append(f"{other} {short.check(other, expected):.1e}")
            peers.append(other)
        except Exception as error:
            told.append(f"{other} left out: {type(error).__name__}: {str(error)[:200]}")
    return peers, ", ".join(told)


def measure(case: Case, rounds: int, burst_s: float) -> Json:
    import torch

    # the buffers of a forward are read again by the next backward
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    peers, told = check_case(case, "cuda", torch.bfloat16)
    problem = Problem(case, "cuda", torch.bfloat16)
    calls = {peer: problem.backward_of(peer) for peer in peers}
    for call in calls.values():
        call()
    row: Json = {"case": case.name, "note": told}
    pairs = case.n * case.n / (2 if case.causal else 1)
    flops = 10 * problem.q.shape[0] * case.heads * pairs * case.d
    for peer, samples in timing.time_loop(calls, rounds, burst_s, least=1).items():
        row[f"{peer}_ms"] = round(timing.median(samples), 5)
        row[f"{peer}_spread"] = round(timing.spread(samples), 4)
        row[f"{peer}_tflops"] = round(flops / timing.median(samples) * 1e-9, 1)
    return row


def shown(row: Json) -> str:
    parts = [f"{x} {row[f'{x}_tflops']}" for x in PEERS if f"{x}_tflops" in row]
    for over in ("", "_in_order"):
        if f"learned{over}_ms" in row:
            ratio = row[f"detached{over}_ms"] / row[f"learned{over}_ms"]
            parts.append(f"learned / detached{over} {ratio:.3f}")
    return "  ".join((*parts, row["note"]))


def dry(cases: Sequence[Case]) -> int:
    import torch

    for reads in dict.fromkeys(case.reads for case in cases):
        case = Case(reads, 40, causal=reads != "triangle", d=16, heads=4, heads_kv=2)
        say(f"{case.name:40} {check_case(case, 'cpu', torch.float32)}")
    return 0


def main() -> int:
    return Bench("bench.learned", __doc__ or "", all_cases, measure, shown, dry, 40).main()


if __name__ == "__main__":
    sys.exit(main())
