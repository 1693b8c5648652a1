"""Carry the GPU facts of a facts file (JSON with sources) into profiles/gpus.json.

python tools/import_facts.py gpu_facts.json profiles/gpus.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

# Short names first, then the names that drivers report where they are others than the entry's own.
ALIASES = {
    "A40": ["a40"],
    "A100-SXM4-80GB": ["a100", "a100-80gb", "A100-SXM-80GB"],
    "A100-SXM4-40GB": ["a100-40gb", "A100-SXM-40GB"],
    "A100-PCIe-80GB": ["a100-pcie", "A100 80GB PCIe"],
    "A100-PCIe-40GB": ["a100-pcie-40gb"],
    "A800-SXM4-80GB": ["a800", "a800-80gb"],
    "H100-SXM5-80GB": ["h100", "h100-sxm", "H100 80GB HBM3"],
    "H100-PCIe-80GB": ["h100-pcie", "H100 80GB HBM2e"],
    "H200-SXM-141GB": ["h200", "h200-sxm"],
    "L40S-48GB": ["l40s"],
    "B200-SXM": ["b200"],
    "RTX-4090-24GB": ["rtx4090", "4090"],
    "RTX-5090-32GB": ["rtx5090", "5090"],
    "RTX-A6000-48GB": ["a6000", "RTX A6000"],
    "RTX-PRO-6000-Blackwell-Server": ["rtxpro6000", "RTX PRO 6000 Blackwell Server Edition"],
}
SYSTEMS = {
    "A100-SXM4-80GB": "a100_sxm", "H100-SXM5-80GB": "h100_sxm", "H200-SXM-141GB": "h200_sxm", "L40S-48GB": "l40s",
    "B200-SXM": "b200_sxm", "RTX-PRO-6000-Blackwell-Server": "rtx_pro_6000_server",
}  # fmt: skip


def main() -> None:
    """Command line: SOURCE OUT."""
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} SOURCE OUT")
    document = json.loads(Path(sys.argv[1]).read_text())
    gpus: list[dict] = []
    for gpu in document["gpus"]:
        if gpu["sources"] == ["same as above"]:
            gpu["sources"] = gpus[-1]["sources"]
        name = gpu.pop("name")
        gpus.append({"name": name, "aliases": ALIASES.get(name, []), "operator_tables": SYSTEMS.get(name), **gpu})
    head = {"schema": "treebudget.gpus", "version": 1, "units": document["units"], "check": document["check"]}
    text = json.dumps({**head, "gpus": gpus}, indent=1, ensure_ascii=False)
    Path(sys.argv[2]).write_text(text + "\n")


if __name__ == "__main__":
    main()
