"""`GradedCache`: the decode loop of `decoding`, fast enough for a model of many layers, on the same packed store.

Between two demotions a store changes by one exact row a query. So the cache keeps what its store decodes to, appends
the row to it, and decodes the store again only when a level moved or a block opened or closed; attention then runs on
the decoded rows in float64. Decoded rows equal `store.reconstruct` bit for bit, and masses, levels and outputs
equal those of `Decoder` up to the order of float64 sums.

Every budget is a `Policy`: graded + residual, RD-V2 (a budget below the floor: floor everywhere), compressed-Quest
(`page_fraction`), and Quest itself (16 bits with `page_fraction`).
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvverify.geodesia import certificate, mass
from kvverify.geodesia.baselines import Footprint, Rows, attend_rows
from kvverify.geodesia.decoding import Decoder
from kvverify.geodesia.ladder import half_down, half_up
from kvverify.geodesia.store import read_bits, reconstruct

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvverify.geodesia.decoding import Policy
    from kvverify.geodesia.pool import PagePool
    from kvverify.geodesia.store import PackedStore

__all__ = ["GradedCache"]


class GradedCache:
    """One layer's cache under a policy: `prefill`, `step`, then `weight` and `footprint` (as in `baselines`).

    `store` is the packed store that served the last query, `rows` what it decodes to.
    """

    store: PackedStore

    def __init__(self, policy: Policy, pool: PagePool) -> None:
        self.decoder = Decoder(policy, pool)
        self.rows = Rows()
        self.weight: Tensor = torch.empty(0)

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> None:
        """Take in the prompt and its last queries.

        Shapes: queries[kv, group, observed, dim], keys[kv, tokens, dim], values[kv, tokens, dim].
        """
        dtype, observed = self.decoder.cache.pool.dtype, self.decoder.policy.observed
        self.decoder.prefill(queries[:, :, -observed:], keys.to(dtype), values.to(dtype))
        self.store = self.decoder.cache.packed()
        self.rows.append(keys.to(dtype), values.to(dtype))  # nothing is demoted before a query

    def step(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Append one token and serve its query: the loop of `Decoder.step` on the decoded rows.

        Shapes: query[kv, group, dim], key[kv, dim], value[kv, dim] -> [kv, group, dim].
        """
        decoder, position = self.decoder, self.rows.length
        cache, policy = decoder.cache, decoder.policy
        keys, values = key[:, None].to(cache.pool.dtype), value[:, None].to(cache.pool.dtype)
        cache.append(keys, values)
        self.rows.append(keys, values)
        out, self.weight = attend_rows(query, self.rows.both, scale=policy.scale)
        seen = self._block_weights(self.weight).mean(1)
        decoder.mass = torch.stack(
            [mass.update(m, new, decay=policy.decay) for m, new in zip(decoder.mass, seen, strict=True)]
        )
        level = cache.level.clone()
        decoder._allocate(position)
        moved = not torch.equal(level, cache.level)
        self._refresh(keys, values, moved=moved)
        decoder.read = decoder._pages(query, self.store, position)
        if decoder.read is None and not moved:
            return out  # what gave the masses is what serves
        readable = None
        if decoder.read is not None:
            readable = decoder.read.repeat_interleave(cache.pool.geometry.block, dim=2)[:, :, : self.rows.length]
        out, self.weight = attend_rows(query, self.rows.both, scale=policy.scale, readable=readable)
        return out

    @property
    def footprint(self) -> Footprint:
        """Bits held, residual and summaries included, and bits that the last query read."""
        store, read = self.store, self.decoder.read
        resident = Fraction(store.accounted_bits)
        if read is None:
            return Footprint(resident, resident, resident)
        each, union = read_bits(store, read)
        return Footprint(resident, Fraction(int(each.sum()), each.shape[1]), Fraction(int(union.sum())))

    def bounds(self, query: Tensor, form: Callable[[Tensor, Tensor], float] = certificate.tightened) -> Tensor:
        """Return the certificate of each query head: a bound on || o - o^ ||_2 for the query just served.

        Shapes: query[kv, group, dim] -> [kv, group].
        """
        cache = self.decoder.cache
        if self.decoder.read is not None:
            raise ValueError("pages are hard-masked, expected a policy that reads every page: only the cap 2 is left")
        weight = self._block_weights(self.weight)
        exact = (0, weight.shape[2] - len(cache.valid))  # the open block
        key_error = torch.nn.functional.pad(cache.key_error, exact)
        value_error = torch.nn.functional.pad(cache.value_error, exact)
        bound = torch.empty(query.shape[:2], dtype=torch.float64)
        for head, member in product(range(query.shape[0]), range(query.shape[1])):
            bound[head, member] = certificate.output_bound(
                weight[head, member],
                key_error[head],
                value_error[head],
                query_norm=float(query[head, member].double().norm()),
                scale=self.decoder.policy.scale,
                radius=float(cache.radius[head]),
                form=form,
            )
        return bound

    def _block_weights(self, weight: Tensor) -> Tensor:
        block = self.decoder.cache.pool.geometry.block
        heads, group, _ = weight.shape
        sums = [mass.block_sums(row, block=block) for row in weight.flatten(0, 1)]
        return torch.stack(sums).reshape(heads, group, -1)

    def _refresh(self, keys: Tensor, values: Tensor, *, moved: bool) -> None:
        """Bring the store, and what it decodes to, up to date after one appended row."""
        cache = self.decoder.cache
        if moved or cache.open_tokens in {0, 1}:  # a block moved, closed or opened
            self.store = cache.packed()
            if moved:
                self.rows.both[:] = torch.stack(reconstruct(self.store))
            return
        old = self.store
        self.store = replace(
            old,
            open_keys=torch.cat([old.open_keys, keys], 1),
            open_values=torch.cat([old.open_values, values], 1),
            box_low=None if old.box_low is None else _last_page(torch.minimum, old.box_low, half_down(keys)),
            box_high=None if old.box_high is None else _last_page(torch.maximum, old.box_high, half_up(keys)),
        )


def _last_page(combine: Callable[[Tensor, Tensor], Tensor], pages: Tensor, row: Tensor) -> Tensor:
    """Widen the box of the open page by one row (rounding is monotone, so it commutes with the extremes).

    Shapes: pages[kv, pages, dim], row[kv, 1, dim] -> [kv, pages, dim].
    """
    return torch.cat([pages[:, :-1], combine(pages[:, -1:], row)], 1)
