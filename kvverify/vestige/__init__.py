"""VestigeKV: evict by the branch, retrieve by an index.

Theory of operation
-------------------
The setting is one MLA layer without rotary position. The cache row of token
u, shared by all heads, is C_u = [c_u ; r_u]: content (512 columns, RMS-normed, also the value) and branch (64
columns, un-normed, never rotated). An absorbed query Q scores it s = scale <Q, C_u>. Nothing in a score knows where a
row stands, so the worth of a row can be judged before its query exists, and the judgement does not age.

Tier 1, when a block closes. `salience` measures how far the branch of a row departs from the slow trend of its block;
`select` keeps the top m = max(1, round(rho closed)) of all closed rows, and the first 4. The others are archived,
bit-exact:

    row -> pending (the tail) -> closed: kept <-> archived

Tier 2, at every decode step. An archived row has an index entry: exact branch, sketch V c_u, residual norm.
`prologue` attends to kept and tail rows and finds the best score s* of each head; `scan` fires every archived row
that may beat it for some head; `attend` reads the fired rows exactly; the results merge. `step.decode` is that chain.

What must stay in sync
----------------------
1. Kept, archived and pending are disjoint and cover the rows; a step attends kept + tail + fetched, each row once.
2. The salience of a closed block never changes; the keep set depends on the rows, never on how they were appended.
3. Index entries are in archive order. `scan` returns positions in the archive; only the archive list turns them into
   pool rows.
4. s* of a head is over exactly the rows that the step attends anyway, and firing is strict.
5. Inflation and gate are calibrated on entries as stored.

In reading order: `salience`, `selection`, `partition`, `pool` (rows in a shared storage), `index`, `scan`, `attend`,
`calibration`, `step`, `stream` (a whole life as one function), `accounting` (bytes read), `bounds` (the paper's
inequalities), `policy` (the operators by their public names). Then the contract: `cases` and `stream_case` are the
inputs, `operators` says what an implementation must return, `claims` are the paper's statements, `mutants` what is
known to break them.
"""

from kvverify.operator import Implementation
from kvverify.vestige.policy import attend, index, prologue, salience, scan, select
from kvverify.vestige.stream import stream as run_stream

__all__ = ["attend", "index", "prologue", "reference", "salience", "scan", "select"]

reference = Implementation(
    "vestige reference",
    {
        "vestige.salience": salience,
        "vestige.select": select,
        "vestige.index": index,
        "vestige.prologue": prologue,
        "vestige.scan": scan,
        "vestige.attend": attend,
        "vestige.stream": run_stream,
    },
)
