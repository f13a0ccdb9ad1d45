"""The rows of `make matrix` agree with pyproject.toml and with CI's matrix; a row that fails fails the run."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from tests import matrix

CHECK = yaml.safe_load((matrix.ROOT / ".github" / "workflows" / "check.yml").read_text())["jobs"]


def test_every_row_lies_in_the_declared_ranges() -> None:
    required = [Requirement(line) for line in matrix.required()]
    assert {"torch", "transformers", "cuda-python"} <= {requirement.name for requirement in required}
    for row, pins in matrix.pins().items():
        pinned = {pin.partition("==")[0]: pin.partition("==")[2] for pin in pins}
        for requirement in required:
            if requirement.name in pinned or row == "oldest":
                assert Version(pinned[requirement.name]) in requirement.specifier, row


def test_the_oldest_row_is_at_the_lower_bounds() -> None:
    required = [Requirement(line) for line in matrix.required()]
    bounds = {f"{name}=={bound.version}" for name, bound in ((each.name, *each.specifier) for each in required)}
    assert set(matrix.pins()["oldest"]) == bounds


def test_a_requirement_without_a_lower_bound_is_refused() -> None:
    with pytest.raises(ValueError, match="write its lower bound first"):
        matrix.oldest("torch<3")


def test_the_tests_of_a_row_exist() -> None:
    assert [path for path in matrix.TESTS if not (matrix.ROOT / path.partition("::")[0]).exists()] == []


def test_ci_runs_every_row_and_every_python() -> None:
    project = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]
    pythons = SpecifierSet(project["requires-python"])
    supported = [f"3.{minor}" for minor in range(30) if Version(f"3.{minor}") in pythons]
    assert CHECK["check"]["strategy"]["matrix"]["python"] == supported
    rows = {include["row"]: include["python"] for include in CHECK["matrix"]["strategy"]["matrix"]["include"]}
    assert rows.keys() == matrix.pins().keys()
    assert (rows["oldest"], rows["newest"]) == (supported[0], supported[-1])


def test_an_environment_that_cannot_be_made_fails_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(matrix, "GPU", ["torch==0.0"])

    def run(command: list[str], *, check: bool = False) -> subprocess.CompletedProcess[str]:
        if "pip" not in command:
            (tmp_path / "gpu").mkdir()
            return subprocess.CompletedProcess(command, 0, "", "")
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for torch==0.0\n")

    monkeypatch.setattr(matrix, "run", run)
    assert matrix.main(["gpu"]) == 1
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.endswith("no environment: ERROR: No matching distribution found for torch==0.0")


@pytest.mark.parametrize(("assertion", "status"), [pytest.param("True", 0, marks=pytest.mark.long), ("False", 1)])
def test_tests_that_fail_fail_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    assertion: str,
    status: int,
) -> None:
    file = tmp_path / "test_one.py"
    file.write_text(f"def test_one():\n    assert {assertion}\n")
    environment = tmp_path / "newest"

    def make(_: Path, versions: list[str]) -> tuple[bool, str]:
        (environment / "bin").mkdir(parents=True)
        (environment / "bin" / "python").symlink_to(sys.executable)
        (environment / "pyvenv.cfg").write_text((Path(sys.prefix) / "pyvenv.cfg").read_text())
        (environment / "lib").symlink_to(Path(sys.prefix) / "lib")
        return True, ""

    monkeypatch.setattr(matrix, "ENVIRONMENTS", tmp_path)
    monkeypatch.setattr(matrix, "make", make)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "1")
    assert matrix.main(["newest", "--tests", str(file)]) == status
    assert ("1 passed" if status == 0 else "1 failed") in capsys.readouterr().out.splitlines()[-1]
    assert environment.exists() == bool(status)
