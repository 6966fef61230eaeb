"""Who may import whom: ARCHITECTURE.md's table, checked on the syntax trees, imports inside functions included."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headrace

PACKAGE = Path(headrace.__file__).parent

# What each part may import from headrace. A part is a folder or a file at the top of the package.
MAY_IMPORT: dict[str, set[str]] = {
    "types": set(),
    "tensor": set(),
    "ops": {"tensor"},
    "sched": {"types"},
    "model": {"ops", "tensor", "types"},
    "backend": {"ops", "tensor", "types", "model.spec", "_core"},
    "text": {"types", "model.files"},
    "run": {"ops", "types", "model", "backend", "_core"},
    "engine": {"types", "tensor", "ops", "sched", "model", "backend", "text", "run", "_core"},
    "server": {"types", "text", "model.files", "engine"},
    "bench": {"types", "tensor", "sched", "model", "backend", "engine", "_core"},
    "cli": {"__version__", "types", "text", "model", "engine", "server", "bench"},
    "__init__": {"types", "engine"},
    "__main__": {"cli"},
}

# sched/ is pure: these and nothing else.
PURE_LIBRARY = {
    "__future__",
    "array",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "hashlib",
    "heapq",
    "math",
    "typing",
}

FORBIDDEN_NAMES = {"utils", "util", "common", "helpers", "helper", "managers", "manager", "misc"}


def source_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names of every import in the file, wherever it stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            # `from headrace import _core` names a module, `from headrace.types import Request` a value
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == "headrace" else {module}
    return names


def is_allowed(name: str, part: str) -> bool:
    inner = name.removeprefix("headrace.")
    return any(inner == allowed or inner.startswith(allowed + ".") for allowed in MAY_IMPORT[part] | {part})


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_its_layer_may(path: Path) -> None:
    part = part_of(path)
    assert part in MAY_IMPORT, f"{path} belongs to no layer; give it one here and in ARCHITECTURE.md"
    ours = {name for name in imports_of(path) if name.split(".")[0] == "headrace"}
    assert not {name for name in ours if not is_allowed(name, part)}


@pytest.mark.parametrize("path", sorted((PACKAGE / "sched").glob("*.py")), ids=lambda path: path.name)
def test_the_scheduler_imports_nothing_that_could_make_it_impure(path: Path) -> None:
    others = {name.split(".")[0] for name in imports_of(path)} - {"headrace"}
    assert others <= PURE_LIBRARY


def test_the_environment_is_read_in_the_command_line_alone() -> None:
    readers = {
        path.relative_to(PACKAGE).as_posix()
        for path in source_files()
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in {"environ", "getenv"}
    }
    assert readers <= {"cli/flags.py"}


def test_nothing_in_the_package_can_execute_data() -> None:
    forbidden_modules = {"pickle", "dill", "marshal", "shelve", "torch", "joblib"}
    for path in source_files():
        assert not {name.split(".")[0] for name in imports_of(path)} & forbidden_modules, path
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            is_call_by_name = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            assert not (is_call_by_name and node.func.id in {"eval", "exec", "compile", "__import__"}), path


def test_no_module_has_a_name_that_says_nothing() -> None:
    names = {part.removesuffix(".py") for path in source_files() for part in path.relative_to(PACKAGE).parts}
    assert not names & FORBIDDEN_NAMES


def test_validation_never_rests_on_assert() -> None:
    """`python -O` removes assert statements; the package has none."""
    for path in source_files():
        assert not any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(path.read_text("utf-8")))), path
