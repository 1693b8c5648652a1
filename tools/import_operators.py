"""Compose every shipped profile that the operator tables allow (needs the extra `ops`).

    python tools/import_operators.py profiles/shipped
"""

from __future__ import annotations

import sys
from pathlib import Path

from costmodel.compose import compose_profile
from costmodel.operators import OperatorTables
from costmodel.shapes import find_shape

SYSTEMS = {"a100": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "l40s": "l40s", "b200": "b200_sxm"}
MODELS = ("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-30B-A3B")


def main() -> None:
    """Command line: FOLDER [NAME ...]."""
    if len(sys.argv) < 2:
        sys.exit(f"usage: {sys.argv[0]} FOLDER [NAME ...]")
    for gpu, system in SYSTEMS.items():
        for model in MODELS:
            name = f"{gpu}-{model.split('/')[-1].lower()}"
            if sys.argv[2:] and name not in sys.argv[2:]:
                continue
            profile = compose_profile(find_shape(model), OperatorTables.find(system))
            path = profile.save(Path(sys.argv[1]) / f"{name}.json")
            print(f"{path}: {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
