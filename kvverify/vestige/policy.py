"""The operators of VestigeKV as references: what a fused kernel is compared with.

Given float64 inputs, each is the oracle of the operator of its name.
"""

from kvverify.vestige.attend import attend, prologue
from kvverify.vestige.index import index
from kvverify.vestige.salience import salience
from kvverify.vestige.scan import scan
from kvverify.vestige.selection import select

__all__ = ["attend", "index", "prologue", "salience", "scan", "select"]
