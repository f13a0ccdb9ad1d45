"""Flags are generated from dataclasses: one source of options."""

from __future__ import annotations

import argparse
import runpy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from vattn.engine.cli import parser
from vattn.engine.cli.engine_flags import chosen_model, engine_options
from vattn.engine.cli.flags import add_fields, given
from vattn.engine.config import EngineConfig
from vattn.engine.options import option
from vattn.engine.requests.sampling import SamplingParams
from vattn.engine.shipped_model import SHIPPED_MODEL
from vattn.errors import ConfigError

FIELDS = {each.name: each for each in fields(EngineConfig)}
# What a shell cannot say, and what would leave the commands without text.
# `--kv-cache-memory-bytes` is `memory_budget`, which also takes such a number.
WITHOUT_FLAG = {"model", "on_step", "skip_tokenizer_init", "kv_cache_memory_bytes"}
OF_BACKENDS = {"num_blocks", "paged_windows", "page_size", "kv_layout"}
# Defaults of commands that differ from the engine's.
CHANGED = {"chat": {"max_num_seqs": 1}, "complete": {"max_num_seqs": 1}, "latency": {"enable_prefix_caching": False}}
WITH_ENGINE = [("generate",), ("chat",), ("complete",), ("bench", "latency"), ("bench", "throughput")]


def command(*names: str) -> argparse.ArgumentParser:
    found = parser()
    for name in names:
        found = next(each for each in found._actions if isinstance(each, argparse._SubParsersAction)).choices[name]
    return found


def leaves(found: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    below = [each for each in found._actions if isinstance(each, argparse._SubParsersAction)]
    return [leaf for each in below for part in each.choices.values() for leaf in leaves(part)] or [found]


@pytest.mark.parametrize("names", WITH_ENGINE, ids=" ".join)
def test_the_engines_flags_are_the_fields_of_its_configuration(names: tuple[str, ...]) -> None:
    (group,) = (group for group in command(*names)._action_groups if group.title == "engine")
    flags = {action.dest: action for action in group._group_actions}
    assert set(flags) == set(FIELDS) - WITHOUT_FLAG | OF_BACKENDS
    assert all(action.help for action in flags.values())
    for name in set(FIELDS) - WITHOUT_FLAG:
        default = {name: FIELDS[name].default, **CHANGED.get(names[-1], {})}[name]
        if default is None or default is False:
            assert "(default:" not in str(flags[name].help), name
        else:
            assert f"(default: {default})" in str(flags[name].help), name


@pytest.mark.parametrize("names", [("generate",), ("chat",), ("complete",)], ids=" ".join)
def test_the_sampling_flags_are_fields_of_sampling_params(names: tuple[str, ...]) -> None:
    (group,) = (group for group in command(*names)._action_groups if group.title == "sampling")
    flags = {action.dest for action in group._group_actions}
    assert flags <= {each.name for each in fields(SamplingParams)}
    assert {"temperature", "top_p", "top_k", "min_p", "max_tokens", "stop", "ignore_eos"} <= flags


def test_names_that_fingers_know() -> None:
    known = {"--max-model-len", "--gpu-memory-utilization", "--kv-cache-memory-bytes", "--max-num-seqs", "--dtype"}
    known |= {"--max-num-batched-tokens", "--enable-prefix-caching", "--no-enable-prefix-caching", "--seed", "--kv"}
    known |= {"--block-size", "--num-blocks", "--paged-windows", "--page-size", "--kv-layout"}
    assert known <= command("generate")._option_string_actions.keys()


def test_the_tables_of_the_reference_are_those_of_the_options() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "write_options.py"))
    for page, text in tables["pages"]().items():
        assert page.read_text() == text, "run: python docs/write_options.py"


def test_every_flag_is_documented() -> None:
    page = (ROOT / "docs" / "reference" / "command-line.md").read_text()
    for leaf in leaves(parser()):
        for flag in leaf._option_string_actions:
            assert flag in ("-h", "--help") or f"`{flag}`" in page, f"{leaf.prog} {flag}"


def test_a_number_of_threads_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--num-threads", "x")
    assert "argument --num-threads: invalid 'auto' or number value: 'x'" in capsys.readouterr().err


def test_help_is_printed_for_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for leaf in leaves(parser()):
        if leaf.add_help:
            leaf.print_help()
            assert "usage: vattn" in capsys.readouterr().out


@dataclass(frozen=True, kw_only=True)
class Settings:
    hidden: int = 5
    host: str = option("127.0.0.1", "address, 100% yours")
    port: int = option(0, "port", parse=int)
    api_keys: tuple[str, ...] = option((), "keys", flag="api-key")
    on: bool = option(True, "on")
    off: bool = option(False, "off")
    either: bool | None = option(None, "either")


def settings(*argv: str, changed: dict[str, Any] | None = None) -> dict[str, Any]:
    made = argparse.ArgumentParser()
    add_fields(made, Settings, changed=changed)
    return given(made.parse_args(argv), Settings)


def test_only_what_was_given() -> None:
    assert settings() == {}
    assert settings("--host", "::1", "--port", "0") == {"host": "::1", "port": 0}
    assert settings("--api-key", "k", "--api-key", "l") == {"api_keys": ("k", "l")}
    assert settings("--no-on", "--off", "--either") == {"on": False, "off": True, "either": True}


def test_a_switch_that_a_command_changes_goes_both_ways() -> None:
    for changed in ({"on": False}, {"off": True}):
        (name,) = changed
        assert settings(f"--{name}", changed=changed) == {name: True}
        assert settings(f"--no-{name}", changed=changed) == {name: False}


def test_the_help_states_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    made = argparse.ArgumentParser()
    add_fields(made, Settings)
    made.print_help()
    shown = " ".join(capsys.readouterr().out.split())
    assert "100% yours (default: 127.0.0.1)" in shown
    assert "port (default: 0)" in shown
    assert "keys; may be repeated --on" in shown
    assert "off --either" in shown


def options(*argv: str, kv: str | None = None) -> dict[str, Any]:
    return engine_options(command("generate").parse_args(["m", "p", *argv]), kv)


def test_flags_of_a_backend_become_its_options() -> None:
    assert options() == {"kv": "virtual"}
    assert options("--page-size", "64KiB", "--kv-layout", "fused") == {
        "kv": "virtual",
        "kv_options": {"page_size": 65536, "layout": "fused"},
    }
    assert options("--page-size", "auto", "--kv-options", '{"watermark": 0.5}')["kv_options"] == {
        "watermark": 0.5,
        "page_size": "auto",
    }
    assert options("--kv", "paged", "--num-blocks", "9", "--block-size", "8") == {
        "kv": "paged",
        "block_size": 8,
        "kv_options": {"num_blocks": 9},
    }


def test_a_switch_of_a_backend() -> None:
    assert options("--kv", "paged", "--paged-windows")["kv_options"] == {"windows": True}
    with pytest.raises(ConfigError, match="--paged-windows is an option of --kv paged, not of --kv virtual"):
        options("--paged-windows")
    with pytest.raises(ConfigError, match="both give windows"):
        options("--kv", "paged", "--paged-windows", "--kv-options", '{"windows": false}')


def test_of_two_backends_each_gets_its_own() -> None:
    argv = ("--kv", "both", "--num-blocks", "9", "--block-size", "8", "--page-size", "4KiB")
    assert options(*argv, kv="virtual") == {"kv": "virtual", "kv_options": {"page_size": 4096}}
    assert options(*argv, kv="paged") == {"kv": "paged", "block_size": 8, "kv_options": {"num_blocks": 9}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--num-blocks", "9"), "--num-blocks is an option of --kv paged, not of --kv virtual; leave it out, or give"),
        (("--block-size", "16"), "--block-size is an option of --kv paged"),
        (("--kv", "paged", "--page-size", "4096"), "--page-size is an option of --kv virtual, not of --kv paged"),
        (("--kv", "static", "--kv-layout", "fused"), "--kv-layout is an option of --kv virtual, not of --kv static"),
        (("--page-size", "4KiB", "--kv-options", '{"page_size": 1}'), "both give page_size; give it once"),
    ],
)
def test_flags_of_another_backend_are_refused(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(*argv)


def test_a_page_size_that_is_no_size(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        options("--page-size", "big")
    assert "page_size='big' is not a size" in capsys.readouterr().err


def test_the_model_that_ships(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert chosen_model("some/model") == "some/model"
    assert capsys.readouterr().err == ""
    assert Path(chosen_model(None)) == SHIPPED_MODEL
    assert SHIPPED_MODEL.resolve() == ROOT / "demo" / "model"
    assert "no MODEL was given" in capsys.readouterr().err
    monkeypatch.setattr("vattn.engine.shipped_model.SHIPPED_MODEL", tmp_path)
    with pytest.raises(ConfigError, match=r"is not at .*; give a path or hub id"):
        chosen_model(None)
