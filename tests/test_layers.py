"""The import graph points down, and heavy libraries are imported in one place each, where they are used."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "probing"
LAYERS = [
    {"types", "tables"},
    {"files", "stats"},
    {"decode", "collect"},
    {"picture", "readouts", "weights", "store", "records", "nested"},
    {"findings", "embed", "encoders", "images", "tasks"},
    {"evaluate", "contract"},
    {"jobs"},
    {"notebook"},
    {"__init__", "__main__"},
]
HOMES = {
    "h5py": {"store"},
    "hydra": {"__main__", "jobs"},
    "timm": {"encoders"},
    "open_clip": {"encoders"},
    "nibabel": {"decode"},
    "pydicom": {"decode", "images"},
    "pyarrow": {"decode", "tables", "images", "encoders"},
    "pandas": {"records", "tables"},
}


def modules() -> list[tuple[Path, str]]:
    """Every file, with the name that the layers know it by."""
    return [(path, path.relative_to(ROOT).parts[0].removesuffix(".py")) for path in sorted(ROOT.rglob("*.py"))]


def imports(path: Path, everywhere: bool = True) -> set[str]:
    """Dotted names that a file imports (for typing alone does not count), or only those at its top level."""
    tree = ast.parse(path.read_text())
    nodes: list[ast.AST] = list(ast.walk(tree)) if everywhere else list(tree.body)
    typing = {n for t in ast.walk(tree) if isinstance(t, ast.If) and "TYPE_CHECKING" in ast.dump(t.test) for n in ast.walk(t)}
    found = set()
    for node in nodes:
        if node in typing:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{a.name}" for a in node.names} if node.module == "probing" else {node.module}
    return found


def layer(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def test_every_file_has_a_layer() -> None:
    assert {name for _, name in modules()} == set().union(*LAYERS)


@pytest.mark.parametrize("path,name", modules(), ids=lambda v: v if isinstance(v, str) else "")
def test_imports_point_down(path: Path, name: str) -> None:
    for target in imports(path):
        if target.startswith("probing."):
            other = target.split(".")[1]
            assert other == name == "jobs" or layer(other) < layer(name), f"{path.name} imports {target}"


def test_nothing_imports_a_member_of_an_open_set() -> None:
    for path, name in modules():
        for target in imports(path):
            assert not target.startswith(("probing.encoders", "probing.images", "probing.tasks")), f"{name} imports {target}"


def test_heavy_libraries_have_one_home() -> None:
    for library, homes in HOMES.items():
        assert {name for path, name in modules() if any(t.split(".")[0] == library for t in imports(path))} <= homes, library


def test_types_and_tables_import_nothing_of_ours() -> None:
    for name in ("types", "tables"):
        assert not [t for t in imports(ROOT / f"{name}.py") if t.startswith("probing")]


def test_the_command_line_starts_without_the_heavy_ones() -> None:
    code = "import sys, probing.__main__; print([m for m in ('torch', 'sklearn', 'scipy', 'h5py', 'pandas', 'timm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
