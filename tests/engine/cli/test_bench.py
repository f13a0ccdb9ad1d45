"""`vattn bench`: a server from the outside, and the engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.fake_openai import DONE, FakeOpenAI, delta, refusal, text, usage
from tests.support.waiting import SECONDS
from vattn.engine import LLM, SamplingParams
from vattn.engine.cli import main
from vattn.engine.kv.virtual import VirtualKV
from vattn.errors import VattnError

# The keys that tools which read vLLM's results expect.
KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "latencies", "queue_times",
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


def latencies(*metrics: str, percentiles: tuple[str, ...] = ("p99",)) -> set[str]:
    return {f"{name}_{metric}_ms" for metric in metrics for name in ("mean", "median", "std", *percentiles)}


def three_tokens(body: dict[str, Any]) -> list[bytes]:
    return [text("w1"), text(" w2"), text(" w3"), usage(6, 3), DONE]


def test_serve(model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    server = FakeOpenAI(three_tokens, root=str(model_path))
    argv = "--num-prompts 8 --random-input-len 6 --random-output-len 3 --max-concurrency 4 --num-warmups 2 --ignore-eos"
    argv += " --temperature 0 --request-rate 500 --burstiness 2 --goodput ttft:60000 e2el:60000 --save-result"
    with server.in_thread() as url:
        args = [*argv.split(), "--base-url", url, "--result-dir", str(tmp_path / "new"), "--result-filename", "a.json"]
        assert main(["bench", "serve", *args]) == 0
    assert len(server.requests) == 10
    body = server.requests[-1][2]
    assert (body["model"], body["max_tokens"], body["ignore_eos"], body["temperature"]) == ("fake", 3, True, 0.0)
    assert len(body["prompt"].split()) == 6
    result = json.loads((tmp_path / "new" / "a.json").read_text())
    assert set(result) == KEYS | latencies("ttft", "tpot", "itl")
    assert (result["completed"], result["failed"]) == (8, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (48, 24)
    assert result["request_goodput"] == result["request_throughput"]
    assert result["output_throughput"] == pytest.approx(24 / result["duration"])
    assert (result["model_id"], result["tokenizer_id"], result["max_concurrency"]) == ("fake", str(model_path), 4)
    out = capsys.readouterr().out
    assert "Serving Benchmark Result" in out
    assert "P99 ITL (ms):" in out


def test_serve_a_chat_with_all_figures(model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    server = FakeOpenAI(lambda body: [delta(role="assistant", content=""), delta(content="w1"), DONE], key="secret")
    argv = ["--backend", "openai-chat", "--tokenizer", str(model_path), "--num-prompts", "2", "--input-len", "5"]
    argv += ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99.9", "--save-detailed"]
    argv += ["--burstiness", "inf"]
    with server.in_thread() as url:
        assert (
            main(["bench", "serve", *argv, "--base-url", url, "--extra-body", '{"user": "me"}', "--disable-tqdm"]) == 0
        )
    assert [path for path, _, _ in server.requests] == ["/v1/chat/completions"] * 2
    assert server.requests[0][2]["user"] == "me"
    (path,) = tmp_path.iterdir()
    assert path.name.startswith("openai-chat-infqps-fake-")
    result = json.loads(path.read_text())
    assert set(result) == KEYS | DETAILS | latencies("ttft", "tpot", "itl", "e2el", percentiles=("p50", "p99.9"))
    assert (result["request_rate"], result["burstiness"]) == ("inf", "inf")
    assert result["generated_texts"] == ["w1", "w1"]
    assert result["mean_tpot_ms"] == 0.0


def test_serve_with_a_file(model_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "w5 w6", "output_tokens": 3}\n')
    server = FakeOpenAI(three_tokens)
    argv = [
        "--dataset-name",
        "custom",
        "--dataset-path",
        str(path),
        "--tokenizer",
        str(model_path),
        "--num-prompts",
        "2",
    ]
    with server.in_thread() as url:
        assert main(["bench", "serve", *argv, "--base-url", url]) == 0
    assert [(body["prompt"], body["max_tokens"]) for _, _, body in server.requests] == [("w5 w6", 3)] * 2


def test_serve_by_host_and_port(model_path: Path) -> None:
    server = FakeOpenAI(three_tokens, root=str(model_path))
    argv = ["--num-prompts", "2", "--input-len", "5", "--disable-tqdm"]
    with server.in_thread() as url:
        host, port = url.removeprefix("http://").split(":")
        assert main(["bench", "serve", *argv, "--host", host, "--port", port]) == 0
    assert len(server.requests) == 2


def test_serve_waits_for_a_server_that_starts(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter([refusal(503, "loading; come back") for _ in range(2)])
    server = FakeOpenAI(lambda body: next(answers, three_tokens(body)), root=str(model_path))
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))  # connections are refused until it listens
    argv = ["--num-prompts", "2", "--input-len", "5", "--port", str(bound.getsockname()[1]), "--disable-tqdm"]
    with contextlib.ExitStack() as running:

        def listen(seconds: float) -> None:
            clock.sleep = lambda seconds: None
            running.enter_context(server.in_thread(bound))

        clock = SimpleNamespace(monotonic=time.monotonic, sleep=listen)
        monkeypatch.setattr("vattn.engine.cli.bench_serve.time", clock)
        assert main(["bench", "serve", *argv]) == 2
        assert "wait for one that starts with --ready-check-timeout-sec" in capsys.readouterr().err
        assert main(["bench", "serve", *argv, "--ready-check-timeout-sec", "600"]) == 0
    assert len(server.requests) == 2 + 1 + 2, "refused, to see that it is ready, measured"
    printed = capsys.readouterr()
    assert printed.err.count("vattn: waiting, since no server answers at ") == 1
    assert printed.err.count("does not answer a request: 503: loading") == 1
    assert re.search(r"Successful requests: +2 ", printed.out)


def test_serve_waits_no_longer_than_it_should(refuses: Callable[[list[str], str], None]) -> None:
    argv = ["--base-url", "http://127.0.0.1:1", "--ready-check-timeout-sec", "1"]
    began = time.monotonic()
    refuses(["bench", "serve", *argv], "no server answers at http://127.0.0.1:1")
    assert time.monotonic() - began >= 1


@pytest.mark.parametrize(
    ("path", "endpoint", "asked"),
    [
        ("/v1", None, "/v1/completions"),
        ("/v1/", "/v1/chat/completions", "/v1/chat/completions"),
        ("/v1", "completions", "/v1/completions"),
        ("/", None, "/v1/completions"),
    ],
)
def test_serve_takes_the_address_with_v1_and_without(
    model_path: Path, path: str, endpoint: str | None, asked: str
) -> None:
    server = FakeOpenAI(three_tokens, root=str(model_path))
    argv = ["--num-prompts", "1", "--input-len", "5", "--disable-tqdm"]
    argv += [] if endpoint is None else ["--endpoint", endpoint]
    with server.in_thread() as url:
        assert main(["bench", "serve", *argv, "--base-url", url + path]) == 0
    assert [path for path, _, _ in server.requests] == [asked]


def test_serve_with_failures(model_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeOpenAI(lambda body: refusal(503, "the queue is full"))
    with server.in_thread() as url:
        argv = [
            "--base-url",
            url,
            "--model",
            "fake",
            "--tokenizer",
            str(model_path),
            "--num-prompts",
            "2",
            "--input-len",
            "5",
        ]
        assert main(["bench", "serve", *argv]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("vattn: a request failed: 503: the queue is full") == 2
    assert "Failed requests:                         2" in captured.out


def test_serve_opens_more_files_than_a_shell_allows(model_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = len(list(Path("/proc/self/fd").iterdir())) + 40
    all_there = asyncio.Barrier(100)

    async def stream() -> AsyncIterator[bytes]:
        await asyncio.wait_for(all_there.wait(), SECONDS)
        yield text("w1") + DONE

    argv = ["--num-prompts", "100", "--input-len", "3", "--tokenizer", str(model_path)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        with FakeOpenAI(lambda body: stream()).in_thread() as url:
            assert main(["bench", "serve", *argv, "--base-url", url]) == 0
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--goodput", "itl:3"], "is no objective"),
        (["--percentile-metrics", "speed"], "choose from ttft,tpot,itl,e2el"),
        (["--metric-percentiles", "x"], "from 0 to 100"),
        (["--request-rate", "0"], "request_rate is 0.0"),
        (["--num-prompts", "0"], "num_prompts is 0"),
        (["--extra-body", "[1]"], "--extra-body is [1]; give a JSON object"),
        (["--max-concurrency", "0"], "max_concurrency is 0"),
        (["--ready-check-timeout-sec", "-1"], "ready_check_timeout_sec is -1"),
        (["--base-url", "http://127.0.0.1:1"], "start one with `vattn serve`"),
        (["--base-url", "http://127.0.0.1:1", "--port", "2"], "no server answers at http://127.0.0.1:1"),
        (["--host", "::1", "--port", "1"], "no server answers at http://[::1]:1"),
        (["--port", "65536"], "'http://127.0.0.1:65536' is no address of a server"),
        (["--model", "m", "--tokenizer", "/nowhere/at/all"], "give its path or hub id with --tokenizer"),
    ],
)
def test_serve_refuses(refuses: Callable[[list[str], str], None], argv: list[str], message: str) -> None:
    refuses(["bench", "serve", *argv], message)


def test_latency(model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "new" / "latency.json"
    argv = [
        "--input-len",
        "6",
        "--output-len",
        "4",
        "--batch-size",
        "3",
        "--num-iters-warmup",
        "1",
        "--num-iters",
        "3",
        "--max-model-len",
        "64",
    ]
    assert main(["bench", "latency", "--model", str(model_path), *argv, "--output-json", str(path)]) == 0
    printed = capsys.readouterr()
    result = json.loads(path.read_text())
    assert set(result) == {"model_id", "avg_latency", "latencies", "percentiles"}
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert result["percentiles"]["50"] == pytest.approx(sorted(result["latencies"])[1])
    assert "Avg latency:" in printed.out
    assert re.search(r"Measured batches: .* 3/3 .*batch.*output: [1-9][\d.]* tokens/s", printed.err)
    assert re.search(r"Processed prompts: .*input: [\d.]+ tokens/s, output: [\d.]+ tokens/s", printed.err)
    assert main(["bench", "latency", "--model", str(model_path), *argv, "--disable-tqdm"]) == 0
    assert "tokens/s" not in capsys.readouterr().err


@pytest.mark.parametrize("given", [(), ("--temperature", "0")])
def test_throughput_samples_as_vllm_does_or_as_asked(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...]
) -> None:
    asked: list[SamplingParams] = []
    generate = LLM.generate

    def noting(self: LLM, prompts: Any, params: Any, **options: Any) -> Any:
        asked.extend(params)
        return generate(self, prompts, params, **options)

    monkeypatch.setattr(LLM, "generate", noting)
    sizes = ("--input-len", "6", "--output-len", "4", "--num-prompts", "2", "--num-warmups", "1")
    assert main(["bench", "throughput", "--model", str(model_path), *sizes, *given]) == 0
    assert {each.temperature for each in asked} == {0.0 if given else 1.0}
    assert len(asked) == 3


def test_throughput(model_path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "throughput.json"
    argv = [
        "--input-len",
        "6",
        "--output-len",
        "4",
        "--num-prompts",
        "5",
        "--num-warmups",
        "2",
        "-n",
        "2",
        "--disable-detokenize",
    ]
    assert main(["bench", "throughput", "--model", str(model_path), *argv, "--output-json", str(path)]) == 0
    result = json.loads(path.read_text())
    assert result["num_requests"] == 5
    assert result["total_num_tokens"] == 5 * (6 + 2 * 4)
    assert result["requests_per_second"] == pytest.approx(5 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(70 / result["elapsed_time"])
    assert set(result) == {
        "model_id", "elapsed_time", "num_requests", "total_num_tokens", "requests_per_second", "tokens_per_second"
    }  # fmt: skip
    assert "Total num output tokens:  40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["latency", "--batch-size", "0"], "batch_size is 0"),
        (["latency", "--batch-size", "99999999999"], "batch_size is 99999999999; it can be at most"),
        (["throughput", "--prefix-len", "99999999999"], "random_prefix_len is 99999999999; it can be at most"),
        (["throughput", "--seed", "-1"], "seed is -1"),
        (["latency", "--input-len", "300"], "over the model's 256 tokens"),
        (["latency", "--num-blocks", "3"], "--num-blocks is an option of --kv paged"),
        (["throughput", "--input-len", "300"], "over the model's 256; give a smaller --input-len"),
        (["throughput", "--dataset-name", "sharegpt"], "give it as --dataset-path"),
        (["throughput", "--dataset-path", "x"], "--dataset-name is random; give sharegpt or custom"),
        (["throughput", "--num-warmups", "-1"], "num_warmups is -1"),
    ],
)
def test_offline_refuses(
    model_path: Path, refuses: Callable[[list[str], str], None], argv: list[str], message: str
) -> None:
    refuses(["bench", argv[0], "--model", str(model_path), *argv[1:]], message)


@pytest.mark.parametrize("measure", ["latency", "throughput"])
def test_offline_with_failures(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, measure: str
) -> None:
    def failing(*args: Any, **options: Any) -> None:
        raise VattnError("the driver is unwell")

    monkeypatch.setattr(VirtualKV, "prepare", failing)
    argv = ["--model", str(model_path), "--input-len", "6", "--output-len", "4"]
    argv += {"latency": ["--batch-size", "2"], "throughput": ["--num-prompts", "2"]}[measure]
    assert main(["bench", measure, *argv]) == 1
    captured = capsys.readouterr()
    assert re.search("^vattn: .*failed.*: the driver is unwell$", captured.err, re.MULTILINE)
    assert captured.out == ""
