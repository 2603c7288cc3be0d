"""One thread, so that a figure does not depend on what else the machine is doing with its cores."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
