"""Real models: what they keep in their cache, how they rotate it, and how the small real one is loaded.

Theory of operation. The policies of this package work on tensors and know no model. Here they meet transformers models
(5.24 or later), and a model is asked rather than guessed:

- `observation` runs single tokens at several positions and keeps what reaches the cache;
- `rotary` explains it: the layout, the sense and the tables of the model's rotary embedding, or a refusal;
- `loading` builds SmolLM2-135M-Instruct and reads real text, both from installed packages and without a download;
- `seeded` makes small models of eight families from a seed; `glassllm` converts a small real one;
- `needles` trains two small MLA models that retrieve, with and without rotary position, and loads the shipped ones;
- `latents` shows what an MLA cache holds, without copying it, and runs a step over rows that a policy chose.

And the model runs on caches of ours, several policies as rows of one batch:

- `attention_layers` says which layers keep rows, and shows latent attention as attention with one KV head;
- `layer_caches` is what a cache must offer; `exact` is the full cache, and attention over ragged heads;
- `serving` lets them serve the model's attention: prompts, questions, greedy answers, teacher-forced scores;
- `history` and `conversation` (RoPERelay), `geodesia_cache` and `vestige_cache` are the three policies.

transformers, gguf and tokenizers are imported where they are used (`pip install 'kvverify[models]'`), so importing this
package needs torch alone.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["require"]


def require(module: str) -> Any:
    """Import an optional `module`, or raise an ImportError that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{module} is not installed: pip install 'kvverify[models]'", name=module) from error
