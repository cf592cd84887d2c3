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
in float64.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from bench import Json, runner
from bench.oracle import attend
from bench.runner import Ratio, Run, Table
from flash_mask_cute import flash_attn_func

TOKENS, SHORT = 32768, 300
OURS = ("learned", "detached", "learned_in_order", "detached_in_order")
# Of the gradient of a table by bf16 against float64, as a share of its largest value.
TABLE_ERROR = 0.03


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


def _bucket(distance: Any) -> Any:
    """T5's: the near ones by themselves, the far ones by the logarithm; 16 for each sign."""
    size = distance.abs()
    far = 8 + (size.clamp(min=1).float() / 8).log2().mul(1.6).int().clamp(min=0, max=7)
    near = size < 8
    return near * size + ~near * far + 16 * (distance > 0)


def _axial(n: int, rows: Any, cols: Any) -> Any:
    side = max(int(n**0.5), 1)
    return lambda s, b, h, q, k: (
        s + rows[h, _bucket(q // side - k // side)] + cols[h, _bucket(q % side - k % side)]
    )


def _distance(n: int, table: Any) -> Any:
    return lambda s, b, h, q, k: s + table[h, (q - k).clamp(-128, 128) + 128]


# The mod of a length and its tables, and the shapes of these, of a length after the heads. A slope
# of either sign would let queries see the farthest keys alone, whose scores have no gradient.
MODS: dict[str, tuple[Callable[..., Any], Callable[[int], list[tuple[int, ...]]]]] = {
    "slopes": (lambda n, x: lambda s, b, h, q, k: s - x[h].abs() * (q - k).abs(), lambda n: [()]),
    "gains": (lambda n, x: lambda s, b, h, q, k: s * x[h], lambda n: [()]),
    "keys": (lambda n, x: lambda s, b, h, q, k: s + x[h, k], lambda n: [(n,)]),
    "queries": (lambda n, x: lambda s, b, h, q, k: s * x[h, q], lambda n: [(n,)]),
    "distance": (_distance, lambda n: [(257,)]),
    "t5": (lambda n, x: lambda s, b, h, q, k: s + x[h, _bucket(q - k)], lambda n: [(32,)]),
    "axial": (_axial, lambda n: [(32,), (32,)]),
    "pairs": (lambda n, x: lambda s, b, h, q, k: s + x[h, q, k], lambda n: [(n, n)]),
}
MODS["triangle"] = MODS["pairs"]


def all_cases() -> Iterator[Case]:
    for name in (name for name in MODS if name != "triangle"):
        yield from (Case(name, n, causal) for n in (8192, 2048) for causal in (False, True))
    yield from (Case("triangle", n, d=32, heads=4, batch=384) for n in (384, 256, 768))
    yield from (Case(name, 8192, d=64) for name in ("slopes", "t5"))
    for name in ("slopes", "keys"):
        yield Case(name, 8192, causal=True, heads=32, heads_kv=8)


class Problem:
    """Tensors of a case; n: the length, if it is another one."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype, n: int = 0) -> None:
        self.case, self.n = case, n or case.n
        generator = torch.Generator(device).manual_seed(0)
        draw = partial(torch.randn, device=device, generator=generator)
        batch = (case.batch or max(1, TOKENS // self.n)) if n == 0 else 2
        heads_kv = case.heads_kv or case.heads
        self.q, self.k, self.v = (
            draw(batch, self.n, count, case.d).to(dtype).requires_grad_()
            for count in (case.heads, heads_kv, heads_kv)
        )
        self.dout = draw(self.q.shape).to(dtype)
        shapes = MODS[case.reads][1](self.n)
        self.tables = [0.5 * draw((case.heads, *shape)) for shape in shapes]
        self.valid = draw(batch, self.n) > -1.5 if case.masks_keys else None

    def mod(self, tables: list[Tensor]) -> Any:
        return MODS[self.case.reads][0](self.n, *tables)

    def mask_mod(self) -> Any:
        valid = self.valid
        return None if valid is None else lambda b, h, q, k: valid[b, k]

    def backward_of(self, peer: str) -> Callable[[], Any]:
        """Runs a backward; returns the gradients of q, k, v, and of the tables if it has them."""
        tables = [x.clone().requires_grad_(not peer.startswith("detached")) for x in self.tables]
        leaves = [self.q, self.k, self.v, *(x for x in tables if x.requires_grad)]
        of_others = {"torch": self._torch, "cuequivariance": self._cuequivariance}
        out = of_others[peer](tables) if peer in of_others else self._ours(tables, peer)
        return partial(torch.autograd.grad, out, leaves, self.dout, retain_graph=True)

    def _ours(self, tables: list[Tensor], peer: str) -> Any:
        return flash_attn_func(
            self.q, self.k, self.v, causal=self.case.causal, score_mod=self.mod(tables),
            deterministic=peer.endswith("in_order"), mask_mod=self.mask_mod(),
        )  # fmt: skip

    def _torch(self, tables: list[Tensor]) -> Any:
        torch._dynamo.reset()
        sizes, mask = (self.n, self.n, str(self.q.device)), None
        if self.case.causal:
            mask = flex.create_block_mask(lambda b, h, q, k: q >= k, None, None, *sizes)
        elif (mask_mod := self.mask_mod()) is not None:
            mask = flex.create_block_mask(mask_mod, self.q.shape[0], None, *sizes)
        attend: Any = torch.compile(flex.flex_attention, dynamic=False)
        q, k, v = (x.transpose(1, 2) for x in (self.q, self.k, self.v))
        options = {"score_mod": self.mod(tables), "block_mask": mask, "enable_gqa": True}
        return attend(q, k, v, **options).transpose(1, 2)

    def _cuequivariance(self, tables: list[Tensor]) -> Any:
        module = importlib.import_module("cuequivariance_torch")
        assert self.valid is not None
        q, k, v = (x.transpose(1, 2)[None] for x in (self.q, self.k, self.v))
        mask = self.valid[None, :, None, None, :]
        return module.triangle_attention(q, k, v, tables[0][None, None], mask)[0].transpose(1, 2)

    def table_gradients(self) -> list[Tensor]:
        """In float64, by autograd."""
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

    def check(self, peer: str, expected: list[Tensor]) -> float | None:
        """The largest error of a table's gradient; None without any. Raises ValueError."""
        backward = self.backward_of(peer)
        if peer.startswith("detached"):
            return None
        names = [f"the gradient of table {number}" for number in range(len(expected))]
        return runner.compare(peer, names, backward()[3:], expected, TABLE_ERROR)

    def is_accepted(self, peer: str) -> bool:
        """Whether ours has an order of sums for this case."""
        try:
            self.backward_of(peer)
        except NotImplementedError:
            return False
        return True


def others_of(case: Case) -> Iterator[str]:
    """Other libraries that compute the case."""
    yield "torch"
    if case.masks_keys and importlib.util.find_spec("cuequivariance_torch") is not None:
        yield "cuequivariance"


def measure(case: Case, run: Run) -> Iterator[Json]:
    # the buffers of a forward are read again by the next backward
    functorch: Any = importlib.import_module("torch._functorch.config")
    functorch.donated_buffer = False
    short = Problem(case, run.device, run.dtype, 40 if run.is_dry else SHORT)
    expected, others = short.table_gradients(), () if run.is_dry else tuple(others_of(case))
    ours = [peer for peer in OURS if short.is_accepted(peer)]
    peers, told = runner.taking_part(ours, others, lambda peer: short.check(peer, expected))
    row: Json = {"case": case.name, "note": told}
    if not run.is_dry:
        problem = Problem(case, run.device, run.dtype)
        calls = {peer: problem.backward_of(peer) for peer in peers}
        for call in calls.values():
            call()
        pairs = case.n * case.n / (2 if case.causal else 1)
        flops = 10 * problem.q.shape[0] * case.heads * pairs * case.d
        row |= runner.figures(run.time(calls), flops)
    yield row


def small(cases: list[Case]) -> list[Case]:
    """Each mod once."""
    known = dict.fromkeys(case.reads for case in cases)
    return [Case(x, 40, causal=x != "triangle", d=16, heads=4, heads_kv=2) for x in known]


TABLE = Table(
    command="bench.learned", about=__doc__, cases=all_cases, measure=measure, small=small,
    ratios=tuple(
        Ratio(f"learned / detached{order}", (f"detached{order}_ms",), f"learned{order}_ms")
        for order in ("", "_in_order")
    ),
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(runner.main(TABLE))
