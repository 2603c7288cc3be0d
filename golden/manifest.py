"""Stage `manifest`: record every tensor of the data in golden/manifest.json.

    python -m golden.manifest        from the root of the repository; `kvverify golden update` does the same

It records no reason: after it alone, `kvverify golden verify` says that the manifest was regenerated without one.
"""

from __future__ import annotations

from pathlib import Path

from kvverify.golden import manifest, pipeline
from kvverify.golden.tree import Tree


def main() -> None:
    """Write the manifest of the data as it lies there."""
    tree = Tree(Path.cwd())
    before = manifest.load(tree) if tree.manifest.exists() else None
    manifest.save(tree, manifest.build(tree, before, pipeline.stages(tree).values()))


if __name__ == "__main__":
    main()
