"""Known-bad implementations of VestigeKV's operators, and equivalent ones, room by room as the claims."""

from kvverify.vestige.mutants import attention, eviction, partition, prologue, retrieval

__all__ = ["attention", "eviction", "partition", "prologue", "retrieval"]
