"""Turn a published CaDDTree latency table (JSON) into a shipped profile.

    python tools/import_published.py a800_qwen3_4b.json Qwen/Qwen3-4B profiles/shipped/a800-qwen3-4b.json

The source has seconds for 0..512 verify tokens at nine contexts; the entries for 0 tokens are dropped, since a forward
always holds the root.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from costmodel.cells import StageCell, VerifyCell
from costmodel.identity import Identity
from costmodel.profile import Profile

SHAPES = {
    "Qwen/Qwen3-4B": {"layers": 36, "hidden": 2560, "heads": 32, "kv_heads": 8, "vocab": 151936},
    "Qwen/Qwen3-8B": {"layers": 36, "hidden": 4096, "heads": 32, "kv_heads": 8, "vocab": 151936},
}
RELEASED = "2026-06-01T00:00:00Z"  # month of the paper; kept fixed so that a second import gives the same file


def convert(document: dict, target: str) -> Profile:
    """The profile of one published table."""
    first = int(document["first_verify_tokens"])
    cells = [
        VerifyCell(first + offset, int(context), 1, float(seconds))
        for context, row in document["verify_seconds"].items()
        for offset, seconds in enumerate(row)
        if first + offset >= 1
    ]
    draft = StageCell("draft", 16, int(document["context_tokens"][0]), 1, float(document["draft_seconds"]))
    identity = Identity(
        device="NVIDIA A800 80GB", target=target, model_shape=SHAPES[target], dtype="bfloat16", quantization="none",
        attention="sdpa", engine="transformers-eager", mode="eager", tensor_parallel=1, block_size=16,
    )  # fmt: skip
    notes = (
        "values were smoothed by the authors with a convex regression per context; they are not raw medians",
        "entries for 0 verify tokens are dropped",
        "selecting and committing are not in the release and cost 0 here",
    )
    source = "CaDDTree release, arXiv 2606.01813, MIT licence"
    return Profile(identity, "published", source, RELEASED, tuple(cells), (draft,), notes)


def main() -> None:
    """Command line: SOURCE TARGET OUT."""
    if len(sys.argv) != 4 or sys.argv[2] not in SHAPES:
        sys.exit(f"usage: {sys.argv[0]} SOURCE TARGET OUT, TARGET one of {', '.join(SHAPES)}")
    source, target, out = sys.argv[1:]
    path = convert(json.loads(Path(source).read_text()), target).save(out)
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
