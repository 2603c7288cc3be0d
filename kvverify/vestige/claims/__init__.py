"""The statements of VestigeKV that an implementation of an operator can keep or break.

Theory of operation
-------------------
`eviction` (salience, selection), `partition` (growing sequences), `attention` (the lemmas about rows without
position), `retrieval` (index, scan, prologue). Three statements are false as printed; their claims have the status
"corrected", hold the counterexample, and tell the proof of what is true instead. A statement about a model, a byte
count or a published figure is no claim about an operator: it is a test of the reference.
"""

from kvverify.vestige.claims import attention, eviction, partition, retrieval

__all__ = ["attention", "eviction", "partition", "retrieval"]
