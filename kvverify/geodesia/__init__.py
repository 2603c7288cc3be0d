"""Geodesia-KV: blocks of a KV cache step down a ladder of precisions as the queries show that they matter less.

Theory of operation
-------------------
A cache is cut into blocks of P = 64 tokens. Per layer and KV head each closed block sits on one rung of the ladder
16, 8, 4, 2, 1 bits per scalar; the last block is open and exact. Per query, in this order (`decoding`):

    append      the token joins the open block, which closes when full (`sequence`, `pool`)
    mass        m <- decay m + (1 - decay) m_new, the current query's weight per block, mean over the group (`mass`)
    hot set     sinks, the query's neighbourhood and the window cannot move now
    allocate    steps with the least added damage m e per saved bit, until the budget holds (`allocate`)
    demote      the page is rewritten on its lower rung; the old one is poisoned and freed (`pool`)
    serve       online softmax over the packed blocks; with boxes, over the best pages only (`attend`, `pages`)

The rules:

    monotone    a level never rises; there is no dense copy to go back to
    nested      one stored 8-bit step serves 8, 4 and 2 bits: demoting equals quantizing directly (`ladder`)
    causal      what serves q_i depends on the prefix and q_i only
    accounted   bytes of the buffers = accounted bits / 8, plus declared index bytes (`accounting`, `store`)
    certified   the cache can bound its own output error from what it still holds (`certificate`)

What must stay in sync: `Geometry.block_bits`, the page layout in `pool` and the planes of `PackedStore`; the rungs of
`LADDER`, the columns of `block_errors` and the costs given to the allocator; `attend` and `reconstruct`.
`plain` is the whole policy once more without any storage; the packed cache is held against it, decision by decision.
`policy` gathers the functions that an implementation binds to; `rates` holds the exact rates of the baselines.
`operators` (with `cases`, `store_case`, `decode_operator`) is the contract, `claims` are the paper's statements,
`mutants` what is known to break them. Statements about tables and statistics are tests: `claims.CLAIMED_ELSEWHERE`.
"""

from kvverify.geodesia import policy
from kvverify.operator import Implementation

__all__ = ["reference"]

reference = Implementation("geodesia reference", {f"geodesia.{name}": vars(policy)[name] for name in policy.__all__})
