"""The statements of RoPERelay, in the paper's order: compact positions, phase relocation, query synchronisation."""

from kvverify.relay.claims import positions, relocation, synchronisation

__all__ = ["positions", "relocation", "synchronisation"]
