"""The size of the code, watched by a machine. Raising a budget is a commit of its own, with a reason."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import headrace

PACKAGE = Path(headrace.__file__).parent
NATIVE = PACKAGE.parent.parent / "csrc"
BENCH = PACKAGE.parent.parent / "bench"

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7  # self included


def python_files() -> list[Path]:
    return sorted([*PACKAGE.rglob("*.py"), *BENCH.glob("*.py")])


def native_files() -> list[Path]:
    return sorted(path for path in NATIVE.rglob("*") if path.suffix in {".cpp", ".h", ".inc"})


@pytest.mark.parametrize("path", [*python_files(), *native_files()], ids=lambda path: path.name)
def test_a_file_stays_small_enough_to_hold_in_the_head(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_a_function_fits_on_a_screen(path: Path) -> None:
    too_long = {
        node.name: length
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not too_long


@pytest.mark.parametrize("path", python_files(), ids=lambda path: path.name)
def test_a_function_takes_few_positional_parameters(path: Path) -> None:
    too_many = {
        node.name: len(node.args.args)
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and len(node.args.args) > MAX_PARAMETERS
    }
    assert not too_many
