"""Write docs/structure.md: one sentence for every module, taken from the module's own docstring."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {
    "profiles": "Data only: shipped profiles, GPU facts, and the index that finds them by name.",
    "costmodel": "Measure, store and fit what a forward costs. Knows nothing of tokens or trees.",
    "selector": "Trellis, search, policies, traces, replay and tuning on plain arrays. Imports no model code.",
    "decoder": "The live side: target, cache, drafters, the loop, tracing, training and benchmarking.",
}
HEAD = """# Structure

Imports go one way: `profiles <- costmodel <- selector <- decoder`, command lines on top; `tests/test_structure.py` fails on an
arrow that runs back up. This page is written by `make docs` from the modules' own docstrings.
"""


def sentence(path: Path) -> str:
    """The first sentence of a module's docstring, on one line."""
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for room, purpose in ROOMS.items():
        parts.append(f"\n## {room}/\n{purpose}\n\n| module | what it is |\n| --- | --- |")
        for path in sorted((ROOT / room).rglob("*.py")):
            if path.name != "__init__.py":
                parts.append(f"| `{path.relative_to(ROOT)}` | {sentence(path)} |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "structure.md").write_text(page(), "utf-8")
