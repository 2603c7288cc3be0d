"""The plain model as a kernel, and the variants of it that several known-bad kernels share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvverify.geodesia import plain
from kvverify.geodesia.accounting import Geometry
from kvverify.geodesia.certificate import output_bound
from kvverify.geodesia.mass import block_sums
from kvverify.geodesia.plain import PlainHead, Trace

__all__ = ["Uncertain", "frugal", "honest", "kernel", "sizes"]


def kernel(head_type: type[PlainHead]) -> Callable[..., Trace]:
    """A kernel that runs this model in fp32."""

    def decode(*args: Tensor, **static: Any) -> Trace:
        return plain.decode(*args, head_type=head_type, honest=True, **static)

    return decode


def honest(*args: Tensor, **static: Any) -> Trace:
    """The trace that is then miscounted."""
    return plain.decode(*args, honest=True, **static)


def sizes(args: tuple[Tensor, ...], static: dict[str, Any]) -> tuple[Geometry, int, int]:
    """Geometry of a head, tokens of the prompt, new tokens."""
    keys = args[4]
    geometry = Geometry(dim=keys.shape[2], block=static["block"], group=static["group"])
    return geometry, args[1].shape[1], keys.shape[1]


class Uncertain(PlainHead):
    """A head whose certificate is computed some other way."""

    def bound(self, query: Tensor, weight: Tensor, pages: Tensor) -> Tensor:
        """Return the certificate of every query head."""
        return torch.stack([self.one_bound(*each) for each in zip(query, weight, pages, strict=True)])

    def one_bound(self, query: Tensor, weight: Tensor, pages: Tensor) -> Tensor:
        """Return the certificate of one query head."""
        drift = torch.nn.functional.pad(self.drift, (0, len(pages) - len(self.level)))
        key_error = drift[0].masked_fill(~pages, torch.inf)
        mass = block_sums(weight.double(), block=self.setting.block)
        found = output_bound(mass, *self.errors(key_error, drift[1]), **self.numbers(query))
        return torch.tensor(found, dtype=torch.float64)

    def errors(self, key_error: Tensor, value_error: Tensor) -> tuple[Tensor, Tensor]:
        """How far keys and values of a block moved."""
        return key_error, value_error

    def numbers(self, query: Tensor) -> dict[str, Any]:
        """The rest that a certificate takes."""
        norm = float(query.double().norm())
        return {"query_norm": norm, "scale": self.setting.scale, "radius": self.radius()}


def frugal(mass: Tensor, error: Tensor, level: Tensor, hot: Tensor, cost: Tensor, allowed: float) -> Tensor:
    """One step at a time, the one of least running ratio, of equal ones the last block's, until the budget holds."""
    loss, saved = mass.double()[:, None] * error.double(), (cost[:-1] - cost[1:]).double()
    ratio = ((loss[:, 1:] - loss[:, :-1]) / saved).masked_fill(torch.arange(len(saved)) < level[:, None], -torch.inf)
    ratio = torch.nn.functional.pad(ratio.cummax(1).values, (0, 1), value=torch.inf)
    found = level.clone()
    while int(cost[found].sum()) > allowed:
        following = ratio.gather(1, found[:, None])[:, 0].masked_fill(hot, torch.inf)
        if not len(following) or following.min() == torch.inf:
            break
        found[len(found) - 1 - int(following.flip(0).argmin())] += 1
    return found
