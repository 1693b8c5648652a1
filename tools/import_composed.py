"""Turn products measured by the Vidur project into a shipped profile of Qwen3-8B; attention is added by a roofline.

    python tools/import_composed.py qwen3_8b_verify_a40_a100_h100_no_attention.csv a40 profiles/shipped/a40-qwen3-8b.json
"""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from costmodel.compose import BLOCK_SIZE, CONTEXTS, REQUESTS, compose_cells
from costmodel.gpus import find_gpu
from costmodel.identity import Identity
from costmodel.profile import Profile
from costmodel.roofline import Roofline, estimate_profile
from costmodel.shapes import find_shape

SIZES = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 72, 80, 96, 104, 112, 128, 136, 160, 192, 224, 256, 264, 320, 384, 448, 512)
BATCH_SIZES = (768, 1024)
RELEASED = "2024-11-01T00:00:00Z"  # of the Vidur snapshot
NOTES = (
    "products, norms and activations are measured kernels (Vidur profiling data, feed-forward and head scaled from nearby "
    "shapes); ATTENTION IS A ROOFLINE ESTIMATE: seconds and low_seconds read the cache once per request at 72 % of the "
    "bandwidth, high_seconds once per token",
    "the table of products steps in eights above 16 tokens, so cliffs are placed to within eight tokens",
    "rotary embedding, sampling and what the host does are not included; selecting and committing cost 0 here",
    f"drafting is a roofline estimate of a DFlash drafter of 5 layers and a block of {BLOCK_SIZE}",
)


def convert(rows: list[dict[str, str]], system: str) -> Profile:
    """The profile of one system of the table."""
    gpu, shape = find_gpu(system), find_shape("Qwen/Qwen3-8B")
    chosen = [row for row in rows if row["system"] == system]
    tokens = np.array([float(row["n"]) for row in chosen])
    seconds = np.array([float(row["T_noattn_ms"]) / 1e3 for row in chosen])
    line = Roofline().operators(gpu, shape)
    zero = replace(
        line, products=lambda rows, outputs, inputs: np.zeros(rows.shape), memory=(1e30, 1.0, 0.0)
    )  # leaves attention alone
    cells = [
        replace(
            cell,
            seconds=round(cell.seconds + base, 7),
            low_seconds=round(cell.seconds + base, 7),
            high_seconds=round((cell.high_seconds or 0) + base, 7),
        )
        for cell in compose_cells(shape, zero, (*SIZES, *BATCH_SIZES), CONTEXTS, REQUESTS)
        for base in [float(np.interp(cell.verify_tokens, tokens, seconds))]
    ]
    drafts = estimate_profile(gpu, shape, sizes=(1, 2)).stages
    identity = Identity(
        device=f"NVIDIA {gpu.name}", target=shape.name, model_shape=shape.identity_shape(), dtype="bfloat16", quantization="none",
        attention="flash", engine="vidur-kernels", mode="captured", tensor_parallel=1, block_size=BLOCK_SIZE,
    )  # fmt: skip
    source = "Vidur profiling data (MIT) for products, roofline for attention and drafting"
    return Profile(
        identity, "composed", source, RELEASED, tuple(cells), drafts, NOTES, executable_verify_tokens=tuple(range(1, 1025))
    )


def main() -> None:
    """Command line: SOURCE SYSTEM OUT."""
    if len(sys.argv) != 4:
        sys.exit(f"usage: {sys.argv[0]} SOURCE SYSTEM OUT")
    with open(sys.argv[1], newline="") as stream:
        path = convert(list(csv.DictReader(stream)), sys.argv[2]).save(Path(sys.argv[3]))
    print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
