"""Kernels of Geodesia-KV that are known to be wrong, and equivalent ones, room by room as the claims."""

from kvverify.geodesia.mutants import allocation, attention, decode, ledger, pages, quantizer

__all__ = ["allocation", "attention", "decode", "ledger", "pages", "quantizer"]
