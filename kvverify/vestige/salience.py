"""Tier 1, first half: how much a row stands out in its branch, before any query exists.

One formula, two operators, two names. The *prefix form* (the paper's) transforms the whole compressed prefix:
appending rows changes every value. The *block form* (the deployed one) transforms each complete block alone: the
values of a closed block never change again. About half of their keep sets differ on structured data: never compare
one with the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from kvverify.vestige.inputs import require_count, require_tensor, working_dtype

__all__ = ["low_band_basis", "salience", "salience_by_projection"]

Measure = Callable[[Tensor], Tensor]


def salience(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    """High-band norm of each row of the branch: sigma_u = || r_u - LP(r)_u ||_2.

    LP keeps bins 0..bandwidth-1 of the real Fourier transform along the rows of one window, per channel, and drops
    the rest. bandwidth 1 removes the mean; bandwidth > window / 2 keeps every bin, and sigma is exactly 0.

    branch[rows, branch] has any floating dtype and any strides. `block` is the window in rows, and the rows must be
    whole blocks; None is the prefix form, one window over all rows. Returns sigma[rows], in the units of the branch:
    float64 for float64, else fp32. Raises ValueError for rows that are not whole blocks, values that are not finite,
    a bandwidth or block below 1. Source: VestigeKV section 4.1, equation 3; the block form is the deployed variant.
    """
    return _per_window(branch, bandwidth, block, _fourier_form)


def salience_by_projection(branch: Tensor, *, bandwidth: int, block: int | None) -> Tensor:
    """Closed form of `salience`: sigma_u = || R_u - A_u (A^T R) ||_2, A = low_band_basis(window, bandwidth).

    Equal up to rounding, and cheaper at a small bandwidth: two thin products in place of two transforms. Arguments,
    result and errors are those of `salience`. Source: derived for this project from equation 3.
    """
    return _per_window(branch, bandwidth, block, _projection_form)


def low_band_basis(window: int, bandwidth: int) -> Tensor:
    """Orthonormal basis A[window, 2 bandwidth - 1], float64, of the signals with no energy from bin `bandwidth` up.

    Columns: the constant window^-1/2, then sqrt(2 / window) times cosine and sine of the frequencies 1..bandwidth-1.
    Raises ValueError for 2 bandwidth > window, where the space is everything.
    """
    require_count("window", window, minimum=2)
    require_count("bandwidth", bandwidth, minimum=1, maximum=window // 2)
    # The phase is reduced while it is an integer: the cosine of a large 2 pi k u / W would lose digits.
    turns = torch.outer(torch.arange(window), torch.arange(1, bandwidth)) % window
    angle = turns.to(torch.float64) * (2 * math.pi / window)
    constant = torch.full((window, 1), window**-0.5, dtype=torch.float64)
    return torch.cat([constant, torch.cat([angle.cos(), angle.sin()], dim=1) * math.sqrt(2 / window)], dim=1)


def _per_window(
    branch: Tensor, bandwidth: int, block: int | None, form: Callable[[Tensor, int, int], Measure]
) -> Tensor:
    require_tensor("branch", branch, (None, None))
    require_count("bandwidth", bandwidth, minimum=1)
    rows = branch.shape[0]
    if block is not None:
        require_count("block", block, minimum=1)
        if rows % block:
            raise ValueError(f"branch has {rows} rows: expected whole blocks of {block}")
    if not torch.isfinite(branch).all():
        raise ValueError("branch holds NaN or infinity, which would spread over a window: expected finite values")
    window = rows if block is None else block
    sigma = branch.new_zeros(rows, dtype=working_dtype(branch))
    if rows == 0 or 2 * bandwidth > window:
        return sigma
    measure = form(sigma, window, bandwidth)
    for start in range(0, rows, window):
        # A fresh contiguous copy: the bits of a closed block may not depend on its neighbours, strides or alignment.
        part = branch[start : start + window].to(sigma.dtype, copy=True, memory_format=torch.contiguous_format)
        sigma[start : start + window] = measure(part)
    return sigma


def _row_norm(rows: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norm


def _fourier_form(_like: Tensor, window: int, bandwidth: int) -> Measure:
    def measure(part: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(part, dim=0)
        spectrum[bandwidth:] = 0
        # Without n the inverse of an odd window comes back one row short.
        return _row_norm(part - torch.fft.irfft(spectrum, n=window, dim=0))

    return measure


def _projection_form(like: Tensor, window: int, bandwidth: int) -> Measure:
    basis = low_band_basis(window, bandwidth).to(like)

    def measure(part: Tensor) -> Tensor:
        return _row_norm(torch.addmm(part, basis, basis.T @ part, alpha=-1))

    return measure
