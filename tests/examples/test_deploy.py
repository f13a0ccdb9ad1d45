"""What examples/deploy starts is a command that exists, from files that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex

import pytest

from tests.support.paths import ROOT
from vattn.engine.cli import parser

DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = re.sub(r"\\\n", " ", (DEPLOY / "Dockerfile").read_text())


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def test_the_image_starts_the_server() -> None:
    (entry,) = (json.loads(text) for text in instructions("ENTRYPOINT"))
    assert entry[:2] == ["vattn", "serve"]
    parser().parse_args([*entry[1:], "some/model", "--max-num-seqs", "32"])
    (port,) = instructions("EXPOSE")
    assert entry[entry.index("--port") + 1] == port
    assert f"127.0.0.1:{port}/health" in DOCKERFILE


def test_stages_build_on_earlier_ones() -> None:
    stages: list[str] = []
    for line in DOCKERFILE.splitlines():
        for used in re.findall(r"from=(\w+)", line):
            assert used in stages
        if found := re.match(r"FROM (\S+) AS (\w+)$", line):
            assert found[1] in stages or found[1].startswith("python:")
            stages.append(found[2])
    assert {"cpu", "cuda"} <= set(stages)


def test_the_context_has_what_the_wheel_is_made_of() -> None:
    lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / path).exists() for path in sent)
    links = {path.resolve().relative_to(ROOT) for path in (ROOT / "vattn").iterdir() if path.is_symlink()}
    assert {str(path) for path in links} == {"engine", "demo/model"} <= sent
    sources = re.findall(r"\b(\w+)/[\w/]+\.cpp", (ROOT / "CMakeLists.txt").read_text().split("if(VATTN_TESTS)")[0])
    assert set(sources) <= sent


@pytest.fixture
def unit() -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "vattn.service")
    return found


def test_the_unit_starts_the_server(unit: configparser.ConfigParser) -> None:
    assert unit.sections() == ["Unit", "Service", "Install"]
    words = shlex.split(unit["Service"]["ExecStart"].replace("$VATTN_ARGS", "some/model --max-num-seqs 32"))
    assert words[0].endswith("/bin/vattn")
    parser().parse_args(words[1:])
    state = unit["Service"]["StateDirectory"]
    assert f"HF_HOME=/var/lib/{state}" in unit["Service"]["Environment"]
