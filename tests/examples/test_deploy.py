"""What examples/deploy starts is a command that exists, from files that exist."""

from __future__ import annotations

import configparser
import json
import re
import shlex

from tests.support.paths import ROOT
from vattn.broker.places import FOLDER_VARIABLE
from vattn.engine.cli import parser
from vattn.units import parse_bytes

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


def test_the_image_has_the_kernels_of_all_machines() -> None:
    stage = DOCKERFILE.split("FROM ")[1]
    before, wheel, _ = stage.partition("RUN pip wheel")
    assert wheel
    assert "\nENV VATTN_KERNELS=all\n" in before


def unit(name: str) -> configparser.ConfigParser:
    found = configparser.ConfigParser(interpolation=None, strict=True, delimiters=("=",))
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / name)
    assert found.sections() == ["Unit", "Service", "Install"]
    return found


def test_the_unit_starts_the_server() -> None:
    service = unit("vattn.service")["Service"]
    words = shlex.split(service["ExecStart"].replace("$VATTN_ARGS", "some/model --max-num-seqs 32"))
    assert words[0].endswith("/bin/vattn")
    parser().parse_args(words[1:])
    assert f"HF_HOME=/var/lib/{service['StateDirectory']}" in service["Environment"]


def test_the_unit_of_a_pool_starts_its_broker() -> None:
    service = unit("vattn-pool.service")["Service"]
    words = shlex.split(service["ExecStart"])
    assert words[0].endswith("/bin/vattn")
    args = parser().parse_args(words[1:])
    assert (words[1:3], args.pool, parse_bytes(args.budget, "--budget")) == (["pool", "serve"], "llm", 48 * 2**30)
    assert service["Environment"] == f"{FOLDER_VARIABLE}=/run/{service['RuntimeDirectory']}"
    assert service["RuntimeDirectoryMode"] == "0700", "a broker refuses a folder that others can enter"
    assert unit("vattn-pool.service")["Unit"]["Before"] == "vattn.service"
    assert (
        unit("vattn.service")["Service"]["ReadWritePaths"] == f"-/run/{service['RuntimeDirectory']}"
    )  # engines do, too
