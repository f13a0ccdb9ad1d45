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
from tests.support import scripts
from tests.support.paths import ROOT

NAMES = [each.name for each in pkgutil.iter_modules(mutations.__path__) if each.name != "__main__"]
MODULES = [importlib.import_module(f"{mutations.__name__}.{name}") for name in NAMES]

# Each in a process of its own, as in the campaign. What it raises is printed.
APPLY = """
import importlib, sys, warnings
warnings.resetwarnings()
import vattn.engine.core, vattn.hf.virtual_cache  # once for all of them
from tests.campaign.isolation import Ended, in_child, set_aside
from tests.campaign.mutations import MUTATIONS
for name in sys.argv[1:]:
    importlib.import_module(name)
set_aside()
for name, mutation in MUTATIONS.items():
    try:
        list(in_child(lambda send: mutation.patch(), quiet_seconds=60))
    except Ended as ended:
        sys.exit(f"{name}: {ended}")
"""


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


@pytest.mark.slow(8)
def test_what_is_rewritten_reads_as_a_mutation_expects() -> None:
    """Otherwise it would end with its own assertion, which counts as found."""
    done = scripts.run(APPLY, *[module.__name__ for module in MODULES], cwd=ROOT)
    assert done.returncode == 0, done.stderr
