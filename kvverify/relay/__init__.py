"""RoPERelay: where the states of an already selected cache stand.

Theory of operation
-------------------
A selector has kept, for each layer and KV head, some states of a long history, with the positions they were read at.
Attention depends on keys and positions through differences of positions alone, and an evicted cache is full of gaps.
RoPERelay closes them, in three rules that change no value, no byte count and no choice of the selector:

* compact positions: the m states of a head go to consecutive positions in source order; every head ends at M - 1,
  with M the largest m. A head that started at 0 instead would end early, at a distance of its own from the question.
* relocation: a key carries the phase of its source. The rule takes it off with the factors that wrote it (divided by
  the squared amplitude, which is not 1 under YaRN and LongRoPE) and puts the phase of the compact position on.
* query synchronisation: the question stands at M, M + 1, ..., and generation goes on from there while M stays.

What must stay in sync:

* keys and positions. Keys move once, from where they were written; a second move would take off a phase they no longer
  have, and repeated small moves drift in 16-bit storage (13 % after 256). `session` refuses it; the sources are kept.
* the table that wrote a key and the table that inverts it. `RotaryTable.fingerprint` tells when one has changed.
* the question and the keys. Compact keys with the question left at L are worse than no change (8.4 against 26.4 of 500
  questions right in per cent, and 36.2 with both moved; Qwen2-7B, BM25-B8192).
* slots and sources. A slot index is not a position once anything was evicted, and slots need not be in source order.

Rooms: `policy` (positions, relocation, rotary tables), `plans` (RoPERelay and the paper's controls on one cache),
`session` (the protocol of questions and answers): none of them knows a model or a selector. `operators` is the
contract, `claims` are the paper's statements, `mutants` what is known to break them.
"""

from kvverify.operator import Implementation
from kvverify.relay.plans import PLANS, Plan, Retained
from kvverify.relay.policy import RotaryTable, compact, default_table, relocate, relocate_positions, rotate
from kvverify.relay.session import RelaySession, begin
from kvverify.relay.session import session as run_session

__all__ = [
    "PLANS",
    "Plan",
    "RelaySession",
    "Retained",
    "RotaryTable",
    "begin",
    "compact",
    "default_table",
    "reference",
    "relocate",
    "relocate_positions",
    "rotate",
]

reference = Implementation(
    "relay reference", {"relay.compact": compact, "relay.relocate": relocate, "relay.session": run_session}
)
