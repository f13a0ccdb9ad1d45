"""Imports go one way: from tests to benchmarks, the engine and the library, and nowhere in a circle."""

from __future__ import annotations

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vattn

_SCRIPT = Path(__file__).parents[2] / "docs" / "draw_imports.py"
_spec = importlib.util.spec_from_file_location("draw_imports", _SCRIPT)
assert _spec is not None
assert _spec.loader is not None
draw_imports = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(draw_imports)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    found: dict[str, set[str]] = draw_imports.import_graph()
    return found


def test_the_graph_is_that_of_all_modules(graph):
    assert {"vattn", "vattn._native", "vattn.cache", "vattn.pool.pool", "vattn.engine.llm"} - graph.keys() == {
        "vattn._native"
    }
    assert "vattn.cache" in graph["vattn.api"]
    assert {"vattn.attention", "vattn.attention.base"} <= graph["vattn.packed.shape"], "packages run their __init__"
    assert "vattn.attention" not in graph["vattn.attention.torch_sdpa"], "but for those that a module lies in"
    assert "vattn.attention.interface" in graph["vattn.attention"], "imports in functions count"


def test_no_module_imports_itself_by_way_of_others(graph):
    assert draw_imports.find_cycle(graph) is None


def test_no_room_imports_itself_by_way_of_others(graph):
    assert draw_imports.find_cycle(draw_imports.rooms(graph)) is None


def test_the_memory_of_caches_has_three_floors(graph):
    """The faces validate, slots and windows decide, the pool executes: none knows those above it, nor its neighbour."""
    rooms, reach = draw_imports.rooms(graph), draw_imports.reachable
    faces = {"vattn.cache", "vattn.block_windows"}
    assert {"vattn.slots", "vattn.pool"} <= rooms["vattn.cache"]
    assert {"vattn.windows", "vattn.pool"} <= rooms["vattn.block_windows"]
    assert not faces & (reach(rooms, "vattn.slots") | reach(rooms, "vattn.windows"))
    assert "vattn.windows" not in reach(rooms, "vattn.slots") | reach(rooms, "vattn.cache")
    assert "vattn.slots" not in reach(rooms, "vattn.windows") | reach(rooms, "vattn.block_windows")
    assert not (faces | {"vattn.slots", "vattn.windows"}) & reach(rooms, "vattn.pool")
    assert "vattn.pool" not in reach(rooms, "vattn.drivers")


def test_the_modules_of_the_engine_name_each_others_types_one_way():
    graph = draw_imports.import_graph(types=True)
    inside = {name for name in graph if name.startswith("vattn.engine.")}
    assert draw_imports.find_cycle({name: graph[name] & inside for name in inside}) is None


def test_relative_imports_are_seen(graph):
    assert {"vattn.engine.kv.base", "vattn.engine.kv.spec"} <= graph["vattn.engine.kv.paged"]
    assert "vattn.engine.scheduling.scheduler" in graph["vattn.engine.core"]
    assert "vattn.engine.metrics" in graph["vattn.engine.server.prometheus"], "of the folder above"


def test_a_cycle_is_found():
    cycle = draw_imports.find_cycle({"a": {"b"}, "b": {"c", "d"}, "c": set(), "d": {"b"}})
    assert cycle == ["b", "d", "b"]


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        ("vattn", ("vattn.engine", "bench", "demo", "tests", "stub_cuda")),
        ("vattn.engine", ("bench", "demo", "tests", "stub_cuda")),
        ("stub_cuda", ("bench", "demo", "tests")),
        ("bench", ("tests",)),
        ("demo", ("tests",)),
        ("tests.support", ("bench", "demo", "tests.campaign")),
    ],
)
def test_no_arrow_points_up(graph, lower, upper):
    back = {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if within(module, lower) and not within(module, *upper) and within(target, *upper)
    }
    assert back == set()


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_what_tests_share_is_imported_by_its_full_name():
    """The graph would not see it otherwise."""
    shared = {path.stem for path in (draw_imports.ROOT / "tests" / "support").glob("*.py")}
    flat = set()
    for name, path in draw_imports.modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                flat |= {(name, alias.name) for alias in node.names if alias.name.partition(".")[0] in shared}
            elif (
                isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").partition(".")[0] in shared
            ):
                flat.add((name, node.module))
    assert flat == set()


def test_the_cache_of_generate_and_packed_steps_are_apart(graph):
    reach = draw_imports.reachable
    rooms = draw_imports.rooms(graph)
    assert "vattn.packed" not in reach(rooms, "vattn.hf")
    assert "vattn.hf" not in reach(rooms, "vattn.packed") | reach(rooms, "vattn.engine.llm")


def test_the_server_knows_the_core_and_no_backend(graph):
    served = {name for name in graph if name.startswith("vattn.engine.server")} | {"vattn.engine.async_engine"}
    known = set().union(*(graph[name] for name in served))
    assert "vattn.engine.core" in known
    assert "vattn.engine.llm" not in known
    assert {name for name in known if name.startswith("vattn.engine.kv.")} == {"vattn.engine.kv.base"}


def test_the_rooms_of_the_engine_are_in_the_order_of_their_table(graph):
    page = (_SCRIPT.parent / "engine.md").read_text()
    rows = re.findall(r"^\| (`.*?`) \|", page.partition("## A request's life")[0], re.MULTILINE)
    order = [name.removesuffix(".py").strip("/") for row in rows for name in re.findall(r"`(.*?)`", row)]
    small = {"absent", "checks", "progress", "shipped_model"}
    rooms = {
        name.removeprefix("vattn.engine."): {
            target.removeprefix("vattn.engine.") for target in targets if target.startswith("vattn.engine.")
        }
        for name, targets in draw_imports.rooms(graph).items()
        if name.startswith("vattn.engine.")
    }
    assert set(order) == rooms.keys() - small
    for name in order:
        assert not rooms[name] & {*order[: order.index(name)]}, name


def test_only_public_names_are_imported_by_name():
    """The graph does not show such imports."""
    others = {name: path for name, path in draw_imports.modules().items() if path != Path(__file__)}
    by_name = {name for name, path in others.items() if "import_module(" in path.read_text()}
    # All but the first two import the files of one folder: commands, backends, benchmarks, modes, mutations.
    assert by_name == {
        "vattn",
        "vattn.engine",
        "vattn.engine.cli",
        "vattn.engine.kv.make",
        "bench.harness.discovery",
        "tests.campaign.campaign",
        "tests.campaign.mutations.__main__",
        "tests.campaign.test_mutations",
    }


def test_the_picture_is_that_of_the_source(graph):
    drawn = draw_imports.draw(draw_imports.rooms(graph))
    assert draw_imports.PICTURE.read_text() == drawn, "run: python docs/draw_imports.py"


@pytest.mark.parametrize("code", ["import vattn; dir(vattn)", "from vattn.engine.cli import main; main(['--help'])"])
def test_nothing_heavy_is_imported_before_it_is_used(code):
    """Seconds, which `vattn --help` would take too."""
    check = "import sys; print({'numpy', 'torch', 'transformers'} & sys.modules.keys(), file=sys.stderr)"
    code = f"import atexit\natexit.register(lambda: exec({check!r}))\n{code}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stderr.strip() == "set()"


def test_the_four_calls_import_neither_transformers_nor_the_engine():
    code = (
        "import sys; from vattn import init, step, KVCache, attention; "
        "print([m for m in ('transformers', 'vattn.engine', 'vattn.hf', 'vattn.packed') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_are_imported_from_where_type_checkers_see_them():
    tree = ast.parse(Path(vattn.__file__).read_text())
    (seen,) = (
        [node for node in each.body if isinstance(node, ast.ImportFrom)]
        for each in tree.body
        if isinstance(each, ast.If) and ast.unparse(each.test) == "TYPE_CHECKING"
    )
    homes = {alias.name: node.module for node in seen for alias in node.names}
    assert homes == {**vattn._HOME, "attention": "vattn"}
    errors = [
        alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module == "vattn.errors"
        for alias in node.names
    ]
    assert sorted(vattn.__all__) == sorted([*homes, *errors])
    for name in vattn.__all__:
        assert getattr(vattn, name).__name__.rpartition(".")[2] == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = vattn.nothing


@pytest.mark.parametrize("module", ["_native", "_kernels"])
def test_a_package_without_its_compiled_modules_says_how_to_get_them(tmp_path, module):
    """The `vattn/` of a checkout, where Python is started in it and what is installed is not editable."""
    (tmp_path / "vattn").mkdir()
    for name in ("__init__.py", "errors.py"):
        shutil.copy(Path(vattn.__file__).with_name(name), tmp_path / "vattn")
    # Without `site`, since an editable install finds `vattn` before the current folder is looked at.
    command = [sys.executable, "-E", "-S", "-c", f"from vattn import {module}"]
    error = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stderr.splitlines()[-1]
    assert error.startswith(f"ImportError: {tmp_path}/vattn has no compiled {module}: ")
    assert "`pip install -e .`" in error
