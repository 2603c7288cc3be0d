"""Attention over a list of cached rows: the ground that all three policies stand on, and no paper of its own.

Theory of operation
-------------------
A cache policy ends in one act: a query attends to some rows of a pool. Which rows, is said by a list of ids, because
kept, fetched and recent rows lie scattered; -1 pads the list to a fixed length. Rules:

* exactly the listed rows take part, each as often as it is listed; nothing else of the pool may reach the result,
  even as NaN times 0;
* the result is a pair (out, lse): the weighted mean of the values, and the natural logarithm of the sum of the
  exponentiated scores;
* an empty list gives (0, -inf). The pair is then the neutral element of `merge`, which joins the results of disjoint
  lists exactly;
* order plays no part, in the list, in the pool, or among the splits of a merge.

`policy` holds the reference, `operators` the contract, `claims` the rules above as checks, `mutants` what is known to
break them.
"""

from kvverify.attention.policy import decode, merge
from kvverify.operator import Implementation

__all__ = ["decode", "merge", "reference"]

reference = Implementation("attention reference", {"attention.decode": decode, "attention.merge": merge})
