"""What all tests share: one thread, and Hypothesis that draws the same cases every time and writes nothing here."""

import atexit
import tempfile

import torch
from hypothesis import configuration, settings

pytest_plugins = ["pytester"]

_elsewhere = tempfile.TemporaryDirectory(prefix="kvverify-tests-")
atexit.register(_elsewhere.cleanup)
configuration.set_hypothesis_home_dir(_elsewhere.name)
settings.register_profile("kvverify-tests", derandomize=True, database=None, deadline=None)
settings.load_profile("kvverify-tests")
torch.set_num_threads(1)
