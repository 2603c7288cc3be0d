"""Known-bad implementations of RoPERelay's operators, and equivalent ones, room by room as the claims."""

from kvverify.relay.mutants import positions, relocation, synchronisation

__all__ = ["positions", "relocation", "synchronisation"]
