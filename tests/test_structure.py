"""The house rules that a machine can check: imports go one way, every module has its sentence, nothing is pickled."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import cli_reference  # noqa: E402
import structure_page  # noqa: E402

ORDER = ["profiles", "costmodel", "selector", "decoder"]
MODULES = sorted(path for package in ORDER for path in (ROOT / package).rglob("*.py"))
HEAVY = {"torch", "transformers"}


def imported(tree: ast.AST) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path: Path) -> None:
    here = ORDER.index(path.relative_to(ROOT).parts[0])
    for name in imported(ast.parse(path.read_text())):
        top = name.split(".")[0]
        if top in ORDER:
            assert ORDER.index(top) <= here, f"{path.relative_to(ROOT)} imports {name}: the arrow runs back up"
        if here < ORDER.index("decoder"):
            assert top not in HEAVY, f"{path.relative_to(ROOT)} imports {name}: only the decoder may need it"


def test_every_module_has_its_sentence_in_the_structure_page() -> None:
    page = (ROOT / "docs" / "structure.md").read_text()
    assert page == structure_page.page(), "docs/structure.md is behind the modules' docstrings: make docs"
    for path in MODULES:
        if path.name != "__init__.py":
            assert structure_page.sentence(path).endswith((".", ":", "?")), f"{path.relative_to(ROOT)} has no sentence"


def test_the_command_reference_is_what_help_says() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == cli_reference.page(), "docs/cli.md is behind --help: make docs"


def test_no_module_unpickles() -> None:
    for path in MODULES:
        names = imported(ast.parse(path.read_text()))
        assert not {"pickle", "dill", "joblib"} & {name.split(".")[0] for name in names}, path
        assert not re.search(r"torch\.(load|save)\(", path.read_text()), path


def test_files_are_short_enough_to_read() -> None:
    long = {str(path.relative_to(ROOT)): lines for path in MODULES if (lines := path.read_text().count("\n")) > 350}
    assert not long
