"""Inputs of VestigeKV's operators: structured spectra, ties, aligned residuals, two-head conflicts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvverify.attention.operators import DecodeCase
from kvverify.cases import Case, Inputs, among, generator, magnitudes
from kvverify.vestige.index import index, provisional_basis
from kvverify.vestige.scan import archive_scores, sound_inflation

__all__ = [
    "SCALE",
    "AttendCase",
    "IndexCase",
    "PrologueCase",
    "SalienceCase",
    "ScanCase",
    "SelectCase",
    "orthonormal",
]

SCALE = 192**-0.5
"""lambda of Kimi Linear: 128 content and 64 branch columns of a query head before absorption."""


def orthonormal(rank: int, content: int, seed: int) -> Tensor:
    """A random basis V[rank, content] with orthonormal rows, exact in float64, stored in fp32."""
    drawn = torch.randn(content, rank, generator=generator(seed, stream=11), dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(drawn).Q.T
    return basis.contiguous().float()


@dataclass(frozen=True, repr=False)
class SalienceCase(Case):
    """A branch of several windows, even and odd. form: "block" (one transform a window) or "prefix" (one over all).

    regime: "tones" has the two bins at the edge of the band, "trend" lies below it, "needles" above it.
    """

    form: str = among("block", "prefix")
    window: int = among(16, 1, 2, 15, 31, 33, 64)
    windows: int = among(2, 0, 1, 3)
    columns: int = among(4, 1, 3, 16)
    bandwidth: int = among(3, 1, 2, 8, 16)
    regime: str = among("normal", "trend", "tones", "needles", "constant", "offset", "tiny", "large")

    @property
    def rows(self) -> int:
        """Rows in all."""
        return self.window * self.windows

    @property
    def block(self) -> int | None:
        """The argument of that name."""
        return self.window if self.form == "block" else None

    @property
    def span(self) -> int:
        """Rows that one transform sees."""
        return self.window if self.form == "block" else max(self.rows, 1)

    def tone(self, frequency: int) -> Tensor:
        """A cosine in one bin of the transform, with a phase of its own per column, float64[rows, columns]."""
        phase = torch.rand(self.columns, generator=generator(self.seed, stream=1), dtype=torch.float64)
        turns = torch.arange(self.rows, dtype=torch.float64)[:, None] * (frequency / self.span) + phase
        return torch.cos(2 * math.pi * turns)

    def build(self) -> Inputs:
        """Build branch[rows, columns] in the storage dtype."""
        random = generator(self.seed)
        noise = torch.randn(self.rows, self.columns, generator=random, dtype=torch.float64)
        branch = noise
        match self.regime:
            case "trend":
                branch = noise * 1e-2 + torch.linspace(-3, 3, self.rows, dtype=torch.float64)[:, None]
            case "tones":
                branch = torch.where(
                    torch.arange(self.columns) % 2 == 0, self.tone(self.bandwidth), self.tone(self.bandwidth - 1)
                )
            case "needles":
                struck = torch.rand(self.rows, 1, generator=random, dtype=torch.float64) < 0.1
                branch = noise * 1e-2 + 8 * noise.sign() * struck
            case "constant":
                branch = torch.full_like(noise, 1.5)
            case "offset":
                branch = noise + 1000
            case "tiny":
                branch = noise * 1e-3
            case "large":
                branch = noise * 64
        return Inputs({"branch": branch.to(self.torch_dtype)}, {"bandwidth": self.bandwidth, "block": self.block})


@dataclass(frozen=True, repr=False)
class SelectCase(Case):
    """Saliences with ties, and how many of them are kept."""

    rows: int = among(12, 0, 1, 2, 33, 64, 257)
    kept: str = among("third", "none", "one", "all but one", "all")
    sinks: int = among(2, 0, 1, 4, 20)
    regime: str = among("distinct", "ties", "equal", "zero", "last block", "near", "infinite", "low sinks", "top sinks")

    @property
    def keep(self) -> int:
        """The argument of that name."""
        counts = {"third": self.rows // 3, "none": 0, "one": 1, "all but one": self.rows - 1, "all": self.rows}
        return min(max(counts[self.kept], 0), self.rows)

    def build(self) -> Inputs:
        """Build salience[rows]; "near" values differ in the last bits of fp32."""
        random = generator(self.seed)
        order = torch.randperm(self.rows, generator=random).double()
        salience = order
        match self.regime:
            case "ties":
                salience = torch.randint(0, 4, (self.rows,), generator=random).double()
            case "equal":
                salience = torch.full_like(order, 2.5)
            case "zero":
                salience = torch.zeros_like(order)
            case "last block":
                salience = order.double() / 2 + (torch.arange(self.rows) >= self.rows - self.rows // 4) * 200
            case "near":
                salience = 1 + order * 2.0**-20
            case "infinite":
                salience = torch.where(order % 5 == 0, torch.inf, order)
            case "low sinks":
                salience = torch.arange(self.rows).double()
            case "top sinks":
                salience = torch.arange(self.rows).double().flip(0)
        return Inputs({"salience": salience.to(self.torch_dtype)}, {"keep": self.keep, "sinks": self.sinks})


@dataclass(frozen=True, repr=False)
class IndexCase(Case):
    """Content rows and a basis. regime: "inside" and "outside" lie in the space of the basis, or beside it."""

    rows: int = among(9, 0, 1, 63, 65)
    content: int = among(24, 16, 64)
    rank: int = among(6, 1, 16)
    basis: str = among("random", "identity")
    regime: str = among("normal", "inside", "outside", "mixed", "large", "tiny", "duplicates")

    def build(self) -> Inputs:
        """Build content in the storage dtype and the basis in fp32."""
        identity = self.basis == "identity"
        basis = (
            provisional_basis(self.rank, self.content) if identity else orthonormal(self.rank, self.content, self.seed)
        )
        rows = torch.randn(self.rows, self.content, generator=generator(self.seed), dtype=torch.float64)
        inside = rows @ basis.double().T @ basis.double()
        match self.regime:
            case "inside":
                rows = inside
            case "outside":
                rows = rows - inside
            case "mixed":
                rows = rows * magnitudes(self.rows, self.seed)[:, None]
            case "large":
                rows = rows * 64
            case "tiny":
                rows = rows * 1e-3
            case "duplicates":
                rows = rows[torch.arange(self.rows) // 3]
        return Inputs({"content": rows.to(self.torch_dtype), "basis": basis})


@dataclass(frozen=True, repr=False)
class AttendCase(Case):
    """A pool of cache rows, whose first columns are also the value, and a list of some of them.

    As in attention.decode: half of the `spare` rows hold NaN, half huge numbers; `pads` counts the -1 in the list;
    `canary` is a listed row that outweighs the others.
    """

    listed: int = among(5, 0, 1, 2, 63, 64, 65, 130)
    heads: int = among(2, 1, 7, 8)
    content: int = among(16, 8, 64)
    branch: int = among(8, 4)
    spare: int = among(3, 40)
    pads: int = among(0, 1, 5, 64)
    regime: str = among("normal", "equal", "negative", "sink", "offset", "tiny", "large", "repeated", "ramp")
    canary: int = among(-1, 0, 1, 63, 64, 65, 1_000_000)

    def build(self) -> Inputs:
        """Build query, rows and ids: row 0 is NaN and never listed, the listed rows lie scattered."""
        pool = DecodeCase(
            seed=self.seed,
            dtype=self.dtype,
            listed=self.listed,
            heads=self.heads,
            dim=self.content + self.branch,
            value_dim=self.content,
            spare=self.spare,
            pads=self.pads,
            regime=self.regime,
            canary=self.canary,
        ).build()
        return Inputs(
            {"query": pool.query, "rows": pool.keys, "ids": pool.ids},
            {"scale": pool.scale, "value_dim": self.content},
        )


@dataclass(frozen=True, repr=False)
class PrologueCase(Case):
    """The attended rows of one step. query: where its content part lies, seen from the basis."""

    kept: int = among(5, 0, 1, 63, 64, 65)
    heads: int = among(2, 1, 7, 8)
    content: int = among(16, 8, 64)
    branch: int = among(8, 4)
    rank: int = among(4, 1, 8)
    regime: str = among("normal", "equal", "negative", "sink", "tiny", "large", "repeated", "ramp")
    query: str = among("free", "inside", "outside")

    def build(self) -> Inputs:
        """Build query and rows in the storage dtype, the basis in fp32."""
        pool = AttendCase(
            seed=self.seed,
            dtype=self.dtype,
            listed=self.kept,
            heads=self.heads,
            content=self.content,
            branch=self.branch,
            regime=self.regime,
        ).build()
        basis = orthonormal(self.rank, self.content, self.seed)
        query = pool.query.clone()
        asked = query[:, : self.content].double()
        inside = asked @ basis.double().T @ basis.double()
        if self.query != "free":
            query[:, : self.content] = (inside if self.query == "inside" else asked - inside).to(query.dtype)
        return Inputs(
            {"query": query, "rows": pool.rows[pool.ids], "basis": basis},
            {"scale": pool.scale, "value_dim": self.content},
        )


@dataclass(frozen=True, repr=False)
class ScanCase(Case):
    """An archive as stored, and a threshold per head that lies in a gap between the scores of its rows.

    inflation: z, or "sound" for sqrt(content - rank). thresholds: "middle" lets about half of the rows fire; +inf is
    a closed gate, -inf an empty kept set. regime: in "two heads" each head wants other rows, at another scale.
    """

    archived: int = among(12, 0, 1, 63, 64, 65, 300)
    heads: int = among(2, 1, 7, 8)
    content: int = among(24, 16, 96)
    branch: int = among(6, 4)
    rank: int = among(8, 1, 16)
    inflation: float | str = among(2.0, 0.0, 8.0, "sound")
    thresholds: str = among("middle", "one closed", "closed", "one open", "low")
    regime: str = among("normal", "two heads", "aligned", "negative", "duplicates", "large", "tiny")

    @property
    def z(self) -> float:
        """The inflation as a number."""
        return sound_inflation(self.content, self.rank) if self.inflation == "sound" else float(self.inflation)

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """query[heads, dim], rows[archived, dim] in the storage dtype, basis[rank, content] in fp32."""
        random = generator(self.seed)
        dim = self.content + self.branch
        query = torch.randn(self.heads, dim, generator=random, dtype=torch.float64)
        rows = torch.randn(self.archived, dim, generator=random, dtype=torch.float64)
        basis = orthonormal(self.rank, self.content, self.seed)
        match self.regime:
            case "two heads":
                query *= (10.0 ** -torch.arange(self.heads).double())[:, None].clamp(min=1e-2)
                mine = torch.arange(self.archived) % self.heads
                rows = rows * 0.3 + 3 * query[mine] / query[mine].norm(dim=1, keepdim=True)
            case "aligned":
                wide = basis.double()
                asked = query[0, : self.content]
                outside = asked - wide.T @ (wide @ asked)
                rows[:, : self.content] = rows[:, : self.rank] @ wide + rows[:, -1:].abs() * outside
            case "negative":
                query, rows = query.abs(), -rows.abs()
            case "duplicates":
                rows = rows[torch.arange(self.archived) // 3]
            case "large":
                query, rows = query * 4, rows * 16
            case "tiny":
                query, rows = query * 1e-2, rows * 1e-2
        return query.to(self.torch_dtype), rows.to(self.torch_dtype), basis

    def thresholds_between(self, score: Tensor) -> Tensor:
        """One threshold per head for score[heads, archived], fp32[heads]: halfway across a gap, then the gates.

        The gap is the narrowest of the middle half that is ten times what may differ: a scan in bf16 falls into it.
        """
        ranked = score.sort(dim=1).values
        rows = score.shape[1]
        if rows < 2 or self.thresholds == "low":
            between = ranked[:, 0] - 0.5 if rows else score.new_zeros(len(score))
        else:
            inner = ranked[:, rows // 4 : max(rows // 4 + 2, rows - rows // 4)].diff(dim=1)
            clear = 1e-4 * (1 + score.abs().amax(dim=1, keepdim=True))
            narrow = inner.where(inner > clear, torch.inf).min(dim=1, keepdim=True)
            gap = narrow.indices.where(narrow.values < torch.inf, inner.argmax(dim=1, keepdim=True)) + rows // 4
            between = (ranked.gather(1, gap) + ranked.gather(1, gap + 1)).flatten() / 2
        match self.thresholds:
            case "one closed":
                between[0] = torch.inf
            case "closed":
                between[:] = torch.inf
            case "one open":
                between[-1] = -torch.inf
        return between.float()

    def build(self) -> Inputs:
        """Build the archive with its index entries as stored: sketch in fp16, residual in fp32."""
        query, rows, basis = self.operands()
        sketch, residual = index(rows[:, : self.content], basis)
        side = rows[:, self.content :].contiguous()
        known, certificate = archive_scores(query.double(), side, sketch, residual, basis, scale=SCALE)
        return Inputs(
            {
                "query": query,
                "side": side,
                "sketch": sketch,
                "residual": residual,
                "basis": basis,
                "threshold": self.thresholds_between(known + self.z * certificate),
            },
            {"scale": SCALE, "inflation": self.z},
        )
