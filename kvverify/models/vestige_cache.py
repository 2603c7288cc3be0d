"""VestigeKV as the cache of a model that decodes: tiers that move as the sequence grows, and an index that learns.

Theory of operation. One `VestigeCache` is one latent-attention layer of one sequence, driven by `serving`, which hands
it rows [r ; c], branch first; here they are C_u = [c ; r], as everywhere in `vestige`.

    prompt      all rows enter the partition at once; the last queries of the prompt calibrate the index
    a token     its row joins the tail; where it completes a block, the block closes and the selection is rerun over
                all closed rows, which moves rows between kept and archived; then its query is served by `step.decode`:
                kept and tail exactly, archived rows through sketch, residual and branch, and exactly where they fire

Calibration uses queries alone: the last `window` tokens, of the prompt and of what was decoded, all heads. The basis of
the sketch is theirs, and inflation and gate are those at which they would have found their best archived row, each
among the rows it may see. It is repeated whenever the archive changes, so that the index entries and the constants fit
what is stored. Until `window` tokens were seen the index is provisional: identity rows, inflation 8, gate open.

Every step is recorded (`reads`), and `accounting` turns it into bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from kvverify.models.attention_layers import attention_layers
from kvverify.models.exact import Growing
from kvverify.models.rotary import probe
from kvverify.vestige.accounting import read_bytes, read_ledger
from kvverify.vestige.calibration import INFLATION_CEILING, conformal_archived, entropy_gate, margins
from kvverify.vestige.index import calibrated_basis, index, provisional_basis
from kvverify.vestige.inputs import require_count, require_real, working_dtype
from kvverify.vestige.partition import EvictionPolicy, Partition, append, archived, attended
from kvverify.vestige.step import Retrieval, decode

__all__ = ["Read", "VestigeCache", "VestigeSettings", "vestige_caches"]


@dataclass(frozen=True)
class VestigeSettings:
    """The settings of both tiers; the defaults are the deployed ones, with an open gate.

    eviction: those of tier 1. rank: of the sketch. recall: the target of the calibration. window: tokens whose queries
    calibrate; of the prompt they are the last ones that `serving` shows (`observed`, 64 unless set).
    inflation: z, None = calibrated. gate: whether the entropy gate is used; calibrated on the end of a prompt, it can
    close for the question that follows. fetch: False leaves out tier 2, and archived rows are lost. cap, width: as in
    `step.Retrieval`.
    """

    eviction: EvictionPolicy = field(default_factory=EvictionPolicy)
    rank: int = 64
    recall: float = 0.90
    window: int = 64
    inflation: float | None = None
    gate: bool = False
    fetch: bool = True
    cap: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.eviction, EvictionPolicy):
            raise ValueError(f"eviction is {self.eviction!r}: expected an EvictionPolicy")
        for name in ("gate", "fetch"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}: expected True or False")
        require_count("rank", self.rank, minimum=1)
        require_real("recall", self.recall, minimum=0.0, maximum=1.0)
        require_count("window", self.window, minimum=1)
        if self.inflation is not None:
            require_real("inflation", self.inflation, minimum=0.0)


@dataclass(frozen=True)
class Read:
    """Rows that one step read of one layer: kept, tail and fetched ones exactly, archived ones through the index.

    overflow: more rows fired than the fetch buffer holds, so that the whole archive was fetched.
    """

    kept: int
    tail: int
    archived: int
    fetched: int
    overflow: bool = False

    def bytes(self, *, rank: int, content: int, branch: int, published: bool = False) -> Fraction:
        """Bytes at the deployed widths, 2 B a value and 4 B a residual: everything, or what the paper counts."""
        rows = {"kept": self.kept, "tail": self.tail, "archived": self.archived, "fetched": self.fetched}
        return read_bytes(read_ledger(**rows, rank=rank, content=content, branch=branch), published=published)


class VestigeCache:
    """Cache of one latent-attention layer; `reads` lists what each step read.

    scale: of a score. branch: columns of the branch, which lead in the rows that `serving` hands over.
    """

    def __init__(self, settings: VestigeSettings, *, scale: float, branch: int) -> None:
        require_count("branch", branch, minimum=1)
        self.settings = settings
        self.reads: list[Read] = []
        self.partition = Partition(settings.eviction)
        self.retrieval: Retrieval | None = None
        self.provisional = True
        self._scale = scale
        self._branch = branch
        self._rows: Growing | None = None
        self._queries: list[Tensor] = []  # [heads, content + branch] of the last tokens
        self._archived = torch.zeros(0, dtype=torch.int64)
        self._sketch = self._residual = torch.zeros(0)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:  # noqa: ARG002 - a row is its own value
        """Take in the prompt and its last queries.

        Shapes: queries[1, heads, observed, dim], keys[1, tokens, dim], values[1, tokens, content].
        """
        self._check(keys)
        if self._rows is not None:
            raise ValueError("a prompt was already read, expected a fresh cache for every sequence")
        rows = self._content_first(keys[0])
        self._rows = Growing(rows)
        self.partition = append(self.partition, rows[:, -self._branch :])
        self._queries = list(self._content_first(queries[0]).unbind(1)[-self.settings.window :])
        self._rebuild()

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:  # noqa: ARG002 - a row is its own value
        """Append one token and serve its query.

        Shapes: query[1, heads, dim], key[1, dim], value[1, content] -> [1, heads, content].
        """
        self._check(key[:, None])
        if self._rows is None:
            raise ValueError("the cache is empty, expected a prompt first")
        row, asking = self._content_first(key), self._content_first(query[0])
        before = self.partition.closed
        self._rows.append(row)
        self.partition = append(self.partition, row[:, -self._branch :])
        self._queries = [*self._queries, asking][-self.settings.window :]
        enough = len(self._queries) == self.settings.window
        if self.partition.closed > before or (self.provisional and enough and self._archived.numel()):
            self._rebuild()
        return self._attend(asking)[None]

    @property
    def content(self) -> int:
        """Columns of the content."""
        return self.rows.shape[1] - self._branch

    @property
    def rows(self) -> Tensor:
        """C_u of every row, [rows, content + branch]; archived rows are as they were written."""
        if self._rows is None:
            raise ValueError("the cache is empty, expected a prompt first")
        return self._rows.view

    def bytes(self, *, published: bool = False) -> Fraction:
        """Bytes that all steps read so far."""
        sizes = {"rank": self.settings.rank, "content": self.content, "branch": self._branch}
        return sum((read.bytes(**sizes, published=published) for read in self.reads), Fraction(0))

    def _attend(self, query: Tensor) -> Tensor:
        settings = self.settings
        listed = attended(self.partition)
        tail = self.partition.rows - self.partition.closed
        if self.retrieval is None:
            raise ValueError("the cache has no index, expected a prompt first")
        searched = self._archived if settings.fetch else self._archived[:0]
        entries = (self._sketch[: len(searched)], self._residual[: len(searched)])
        result = decode(query, self.rows, listed, searched, *entries, self.retrieval, scale=self._scale)
        self.reads.append(Read(len(listed) - tail, tail, len(searched), len(result.fetched), result.overflow))
        return result.out

    def _rebuild(self) -> None:
        """Calibrate on the last queries, and index the archive anew."""
        settings = self.settings
        content = self.rows[:, : self.content]
        queries = torch.cat(self._queries) if self._queries else self.rows[:0]
        self.provisional = len(self._queries) < settings.window
        basis = (
            provisional_basis(settings.rank, self.content)
            if self.provisional
            else calibrated_basis(queries[:, : self.content], rank=settings.rank)
        )
        sketch, residual = index(content, basis)
        inflation, theta = INFLATION_CEILING, -math.inf
        if not self.provisional:
            inflation, theta = self._calibrated(queries, sketch, residual, basis)
        if settings.inflation is not None:
            inflation = settings.inflation
        self._archived = archived(self.partition)
        self._sketch, self._residual = sketch[self._archived], residual[self._archived]
        self.retrieval = Retrieval(basis, inflation, theta, cap=settings.cap, width=settings.width)

    def _calibrated(self, queries: Tensor, sketch: Tensor, residual: Tensor, basis: Tensor) -> tuple[float, float]:
        """Inflation and theta at which the last queries find their best archived rows."""
        rows = self.rows
        place = torch.arange(len(rows), device=rows.device)
        position = place[-len(self._queries) :].repeat_interleave(len(self._queries[0]))
        kept = torch.ones_like(place, dtype=torch.bool)
        kept[archived(self.partition)] = False
        sample = margins(queries, position, rows, kept, sketch, residual, basis, scale=self._scale)
        inflation = conformal_archived(sample, recall=self.settings.recall)
        if not self.settings.gate:
            return inflation, -math.inf
        wide = working_dtype(queries, rows)
        score = self._scale * (queries.to(wide) @ rows.to(wide).T)
        share = score.where(kept & (place <= position[:, None]), -math.inf).softmax(dim=1)
        entropy = torch.special.entr(share).sum(dim=1).nan_to_num(0.0)  # of no row at all it is 0, as in `prologue`
        return inflation, entropy_gate(entropy, sample.hard, recall=self.settings.recall)

    def _content_first(self, rows: Tensor) -> Tensor:
        """Turn [..., branch + content] into [..., content + branch]."""
        return torch.cat([rows[..., self._branch :], rows[..., : self._branch]], dim=-1)

    def _check(self, keys: Tensor) -> None:
        if keys.shape[0] != 1 or keys.shape[2] <= self._branch:
            wanted = f"[1, tokens, more than {self._branch}], the rows of a latent-attention layer"
            raise ValueError(f"keys has shape {list(keys.shape)}: expected {wanted}")


def vestige_caches(model: Any, settings: VestigeSettings, *, allow_rotary: bool = False) -> list[VestigeCache]:
    """Make the caches of every attention layer of `model`, for one row of `serving.serving`.

    ValueError for a model with an attention layer that is not latent, for a rank above its content, and, unless
    `allow_rotary`, for one that rotates the branch: then salience and score of a row depend on where it stands, and
    the policy's promise is void. Such a model is served all the same if allowed, for comparison.
    """
    caches = []
    for layer in attention_layers(model):
        name = f"layer {layer.index} of {type(model).__name__}"
        if not layer.latent:
            raise ValueError(f"model: {name} caches keys and values: expected latent attention (MLA)")
        rotary_dims = probe(model, layer=layer.index).rotary_dims
        if rotary_dims and not allow_rotary:
            raise ValueError(
                f"model: {name} rotates {rotary_dims} dims of its branch: expected none, or allow_rotary=True"
            )
        require_count("rank", settings.rank, maximum=model.config.kv_lora_rank)
        caches.append(VestigeCache(settings, scale=layer.scale, branch=model.config.qk_rope_head_dim))
    return caches
