"""Compose every shipped profile that the operator tables allow (needs the extra `ops`), and estimate the rest of the A40's.

    python tools/import_operators.py profiles/shipped
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from costmodel.compose import compose_profile
from costmodel.gpus import find_gpu
from costmodel.operators import OperatorTables
from costmodel.profile import Profile
from costmodel.roofline import estimate_profile
from costmodel.shapes import find_shape

SYSTEMS = {"a800": "a100_sxm", "a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s", "b200": "b200_sxm"}
MODELS = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")


A800_NOTE = "the tables are of an A100-SXM4-80GB, which an A800 equals but for NVLink; that matters across GPUs only"


def estimate_a40(folder: Path, model: str) -> None:
    """An A40 profile from a roofline calibrated to the products of Qwen3-8B measured on it."""
    known = Profile.load(folder / "a40-qwen3-8b.json")
    alone = replace(known, verify=tuple(cell for cell in known.verify if cell.num_requests == 1))
    profile = estimate_profile(find_gpu("a40"), find_shape(model), alone)
    path = profile.save(folder / f"a40-{model.split('/')[-1].lower()}.json")
    print(f"{path}: {path.stat().st_size} bytes")


def main() -> None:
    """Command line: FOLDER [NAME ...]."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [NAME ...]")
    for gpu, system in SYSTEMS.items():
        for model in MODELS:
            name = f"{gpu}-{model.split('/')[-1].lower()}"
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            if gpu == "a800" and model.startswith("Qwen/Qwen3-") and not model.endswith("A3B"):
                continue  # published tables are shipped instead
            profile = compose_profile(find_shape(model), OperatorTables.find(system))
            if gpu == "a800":
                identity = replace(profile.identity, device="NVIDIA A800-SXM4-80GB")
                profile = replace(profile, identity=identity, notes=(*profile.notes, A800_NOTE))
            path = profile.save(Path(sys.argv[1]) / f"{name}.json")
            print(f"{path}: {path.stat().st_size} bytes")
    for model in MODELS:
        if not sys.argv[2:] and model != "Qwen/Qwen3-8B":
            estimate_a40(Path(sys.argv[1]), model)


if __name__ == "__main__":
    main()
