"""Mutations patch what there is: one that assigns to a name that was renamed would change nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.campaign import mutations

NAMES = [each.name for each in pkgutil.iter_modules(mutations.__path__) if each.name != "__main__"]
MODULES = [importlib.import_module(f"{mutations.__name__}.{name}") for name in NAMES]


def patched(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Every `owner.name = ...` in the module's functions, where the owner is reached from a global name."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Attribute):
                root: ast.expr = target
                while isinstance(root, ast.Attribute):
                    root = root.value
                if isinstance(root, ast.Name) and hasattr(module, root.id):
                    yield ast.unparse(target.value), target.attr


@pytest.mark.parametrize("module", MODULES, ids=NAMES)
def test_what_is_patched_exists(module: ModuleType) -> None:
    for owner, name in patched(module):
        assert hasattr(eval(owner, vars(module)), name), f"{owner} has no {name}"


def test_the_mutations_of_caches_are_looked_at() -> None:
    found = {name for module in MODULES for name in patched(module)}
    assert ("calls.Calls", "_recover") in found
    assert len(found) > 30
