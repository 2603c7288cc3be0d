"""Tier 2, the index: what an archived row leaves behind, and the basis of its sketch."""

from __future__ import annotations

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_tensor, row_chunks, working_dtype

__all__ = ["calibrated_basis", "index", "provisional_basis", "query_parts"]


def index(content: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """Index entries of rows: sketch V c_u and residual eta_u = || c_u - V^T V c_u ||_2.

    content[rows, content], basis V[rank, content] with orthonormal rows. Returns (sketch[rows, rank],
    residual[rows]): both float64 if an input is float64, else as stored, fp16 and fp32. Beside the exact bf16 branch
    of 64 columns, an entry of rank 64 has 260 B. Raises ValueError for shapes that do not fit and for a sketch beyond
    the range of fp16. Source: VestigeKV section 4.2.
    """
    require_tensor("basis", basis, (None, None))
    rank, width = basis.shape
    require_tensor("content", content, (None, width))
    require_count("rank of basis", rank, maximum=width)
    wide = working_dtype(content, basis)
    basis = basis.to(wide)
    sketch = content.new_empty(content.shape[0], rank, dtype=torch.float64 if wide == torch.float64 else torch.float16)
    residual = content.new_empty(content.shape[0], dtype=wide)
    for chunk in row_chunks(content.shape[0]):
        part = content[chunk].to(wide)
        coordinates = part @ basis.T
        sketch[chunk] = coordinates
        # The norm of the difference: sqrt(|c|^2 - |V c|^2) would lose half the digits of a small residual.
        residual[chunk] = torch.linalg.vector_norm(torch.addmm(part, coordinates, basis, alpha=-1), dim=1)
    if torch.isinf(sketch).any():
        raise ValueError("content has a sketch beyond 65504: expected one within the range of fp16")
    return sketch, residual


def provisional_basis(rank: int, content: int) -> Tensor:
    """V[rank, content] before any query was seen: the first rows of the identity, fp32.

    It goes with inflation 8 and an open gate.
    """
    require_count("rank", rank, maximum=content)
    return torch.eye(rank, content, dtype=torch.float32)


def calibrated_basis(queries: Tensor, *, rank: int) -> Tensor:
    """V[rank, content]: top eigenvectors of the covariance of the mean-centred content part queries[n, content].

    Orthonormal rows, largest eigenvalue first, signs arbitrary; float64 for float64 queries, else fp32.
    """
    require_tensor("queries", queries, (None, None))
    require_count("number of queries", queries.shape[0], minimum=1)
    require_count("rank", rank, maximum=queries.shape[1])
    centred = queries.to(torch.float64)
    centred = centred - centred.mean(dim=0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)
    leading: Tensor = vectors.flip(1)[:, :rank].T
    return leading.contiguous().to(working_dtype(queries))


def query_parts(query: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """V q_c [heads, rank] and ||(I - V^T V) q_c|| [heads], for the content part of query[heads, content + branch]."""
    require_tensor("basis", basis, (None, None))
    require_tensor("query", query, (None, None))
    require_count("width of query", query.shape[1], minimum=basis.shape[1])
    wide = working_dtype(query, basis)
    content, basis = query[:, : basis.shape[1]].to(wide), basis.to(wide)
    sketch = content @ basis.T
    return sketch, torch.linalg.vector_norm(content - sketch @ basis, dim=1)
