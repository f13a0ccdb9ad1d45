"""`vattn plan`: what it prints, reads and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from vattn.engine.cli import main
from vattn.engine.cli.plan import read_lengths
from vattn.model_shapes import find_shape
from vattn.plan import plan


def test_a_table_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--max-len", "131072", "--memory", "80GiB", "--tp", "2", "--batch", "64"]
    assert main(["plan", "Llama-3-8B", *args]) == 0
    out = capsys.readouterr().out
    assert "32 layers of 4 KV heads of 128; bfloat16: 64.0 KiB per token on each of 2 GPUs" in out
    lines = out.splitlines()
    rows = [line for line in lines if line.startswith(("  paged", "  virtual", "> virtual"))]
    assert len(rows) == 4 + 3 * 6 + 1  # the recommended one, whose pages are larger
    (chosen,) = [row for row in rows if row.startswith("> ")]
    assert chosen.split()[1:5] == ["virtual,", "sliced", "4.0", "MiB"]
    assert "64.0 KiB*" in out
    assert "*: not in this device's driver" in lines
    assert "Recommended: virtual, layout 'sliced', pages of 4.0 MiB. 19 requests of these lengths fit" in out


def test_json_is_the_library_s_plan(model_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For a config of transformers, with a trace."""
    trace = tmp_path / "trace.json"
    trace.write_text("[10, 200, 30]")
    args = ["--memory", "4MiB", "--device", "cpu", "--lengths", str(trace), "--block-sizes", "8,32", "--json"]
    assert main(["plan", str(model_path), *args, "--page-sizes", "4KiB,64K", "--batch", "8"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = plan(
        find_shape(str(model_path)).groups,
        memory=4 << 20,
        max_context_len=256,
        max_batch_size=8,
        lengths=[10, 200, 30],
        device="cpu",
        block_sizes=[8, 32],
        page_sizes=[4096, 65536],
    ).to_dict()
    assert found.items() >= json.loads(json.dumps(expected)).items()
    assert found["mean_tokens"] == 80
    assert found["token_bytes"] == 2 * 2 * 2 * 8 * 4
    assert main(["plan", str(model_path / "config.json"), *args]) == 0


@pytest.mark.parametrize(
    "text",
    [
        "[12, 7]",
        "12\n7\n",
        '[{"prompt_tokens": 10, "completion_tokens": 2}, {"prompt_tokens": 7}]',
        '{"input_length": 10, "output_length": 2}\n{"input_length": 3, "output_length": 4}\n',
        '{"text": "a\u2028b", "input_length": 10, "output_length": 2}\n{"input_length": 3, "output_length": 4}\n',
        '{"input_lens": [10, 3], "output_lens": [2, 4], "duration": 3.5}',
    ],
)
def test_traces_of_several_kinds(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text, encoding="utf-8")
    assert read_lengths(tmp_path / "trace") == [12, 7]


def test_a_trace_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "trace").write_text('{"prompt_tokens": 10, "completion_tokens": 2}')
    assert read_lengths(tmp_path / "trace") == [12]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty"),
        ("[]", "is empty"),
        ("tokens: 3", "is not JSON"),
        ("[3, -1]", "has no length in place 2"),
        ('[{"prompt_tokens": "10"}]', "has no length in place 1"),
        ('[{"prompt_tokens": 5, "completion_tokens": 1.5}]', "has no length in place 1"),
        ('[{"text": "a"}]', "has no length in place 1"),
        ('{"input_lens": [1, 2], "output_lens": [1]}', "input_lens and output_lens differ in number"),
        ('{"input_lens": 5, "output_lens": 6}', "input_lens and output_lens are not both lists"),
        ('{"input_lens": null, "output_lens": null}', "input_lens and output_lens are not both lists"),
        ("\udcff", "is not JSON that can be read"),
        ("[" * 100_000, "is not JSON that can be read (maximum recursion depth exceeded"),
        ("1" * 5000, "is not JSON that can be read"),
        ("[99999]", "lengths=99999 must be a whole number from 1 to 8192"),
    ],
)
def test_traces_that_are_none(
    tmp_path: Path, refuses: Callable[[list[str], str], None], text: str, message: str
) -> None:
    trace = tmp_path / "trace.json"
    trace.write_text(text, encoding="utf-8", errors="surrogateescape")
    refuses(["plan", "Gemma-2-9B", "--memory", "1GiB", "--lengths", str(trace)], message)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["Llama-4", "--memory", "1GiB"], "'Llama-4' is no path, no hub id"),
        (["Llama-3-8B", "--memory", "much"], "--memory='much' is not a size"),
        (["Llama-3-8B", "--memory", "1GiB", "--block-sizes", "16,x"], "--block-sizes '16,x'"),
        (["Llama-3-8B", "--memory", "1GiB", "--page-sizes", "64KiB,"], "--page-sizes"),
        (["Llama-3-8B", "--memory", "1GiB", "--batch", "0"], "max_batch_size=0"),
        (["Llama-3-8B", "--memory", "1GiB", "--max-len", "0"], "max_context_len=0"),
        (["Llama-3-8B", "--memory", "1GiB", "--dtype", "int4"], "dtype='int4'"),
        (["Llama-3-8B", "--memory", "1GiB", "--tp", "0"], "tensor_parallel=0"),
        (["Llama-3-8B", "--memory", "1GiB", "--lengths", "/nowhere/trace.json"], "/nowhere/trace.json"),
    ],
)
def test_errors_are_one_line(refuses: Callable[[list[str], str], None], args: list[str], message: str) -> None:
    refuses(["plan", *args], message)


def test_its_help_imports_no_torch() -> None:
    code = (
        "import sys; from vattn.engine.cli import parser; parser('plan').parse_args(['plan', 'm', '--memory', '1']); "
    )
    done = subprocess.run([sys.executable, "-c", code + "sys.exit('torch' in sys.modules)"], check=False)
    assert done.returncode == 0
