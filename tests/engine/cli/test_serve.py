"""`vattn serve`: flags of the engine and of the server reach them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import pytest

from vattn.engine.cli import main, parser
from vattn.engine.config import EngineConfig
from vattn.engine.options import option
from vattn.engine.shipped_model import SHIPPED_MODEL
from vattn.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Settings of a server that only notes them."""

    host: str = option("127.0.0.1", "address")
    port: int = option(8000, "port", parse=int)
    api_key: tuple[str, ...] = option((), "keys")
    served_model_name: tuple[str, ...] = option((), "names")
    dashboard: bool = option(True, "a page")

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise ConfigError(f"port is {self.port}; give one from 1 to 65535")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, Any]]:
    """What the stand-in for the server was started with."""
    calls: list[tuple[EngineConfig, Any]] = []

    def serve(config: EngineConfig, settings: Any) -> int:
        calls.append((config, settings))
        return 3

    server, settings = ModuleType("vattn.engine.server"), ModuleType("vattn.engine.server.settings")
    server.serve, settings.ServerSettings = serve, ServerSettings  # type: ignore[attr-defined]
    server.settings = settings  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vattn.engine.server", server)
    monkeypatch.setitem(sys.modules, "vattn.engine.server.settings", settings)
    return calls


def test_flags_reach_the_engine_and_the_server(served: list[tuple[EngineConfig, Any]]) -> None:
    argv = "serve some/model --port 9000 --api-key a --api-key b --no-dashboard --max-num-seqs 7 --page-size 64KiB"
    assert main(argv.split()) == 3
    ((config, settings),) = served
    assert config.model == "some/model"
    assert (config.max_num_seqs, config.kv_options) == (7, {"page_size": 65536})
    assert settings == ServerSettings(port=9000, api_key=("a", "b"), dashboard=False)


def test_without_a_model_the_one_that_ships(
    served: list[tuple[EngineConfig, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve"]) == 3
    ((config, settings),) = served
    assert config.model == str(SHIPPED_MODEL)
    assert settings == ServerSettings(served_model_name=("demo_model",))
    assert config.max_num_seqs == EngineConfig.max_num_seqs
    assert capsys.readouterr().err == "", "the log is JSON lines only"
    assert main(["serve", "--served-model-name", "small"]) == 3
    assert served[-1][1].served_model_name == ("small",)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["m", "--port", "0"], "port is 0"),
        (["m", "--max-model-len", "1"], "max_model_len is 1"),
        (["m", "--num-blocks", "5"], "--num-blocks is an option of --kv paged"),
    ],
)
def test_bad_values_start_nothing(
    served: list[tuple[EngineConfig, Any]], capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    assert main(["serve", *argv]) == 2
    assert message in capsys.readouterr().err
    assert served == []


@pytest.mark.usefixtures("served")
def test_the_flags_are_the_fields() -> None:
    commands = next(each for each in parser()._actions if isinstance(each, argparse._SubParsersAction))
    flags = commands.choices["serve"]._option_string_actions
    assert {
        "--host",
        "--port",
        "--api-key",
        "--no-dashboard",
        "--kv",
        "--max-model-len",
        "--num-blocks",
    } <= flags.keys()


@pytest.mark.parametrize("argv", [[], ["some/model", "--port", "1"], ["--help"], ["--host=x", "m"]])
def test_without_its_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vattn.engine.server.settings", None)
    assert main(["serve", *argv]) == 2
    assert "pip install 'vattn[server]'" in capsys.readouterr().err


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    known: Callable[[str], str] = metadata.version

    def version(name: str) -> str:
        if name == "aiohttp":
            raise metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(metadata, "version", version)


@pytest.mark.usefixtures("nothing_installed")
def test_a_package_of_the_extra_is_missing(
    served: list[tuple[EngineConfig, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    for command in (["serve", "m"], ["bench", "serve"]):
        assert main(command) == 2
        assert f"vattn {command[0]}" in (error := capsys.readouterr().err)
        assert "needs aiohttp: pip install 'vattn[server]'" in error
    assert served == []
