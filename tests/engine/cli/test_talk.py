"""`vattn chat` and `vattn complete`: with a model here, and with one on a server."""

from __future__ import annotations

import contextlib
import io
import socketserver
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_openai import DONE, FakeOpenAI, delta, event, refusal, text
from tests.support.tiny_models import expected, make_model, make_tokenizer
from vattn.engine.cli import main
from vattn.engine.cli.remote import api_root
from vattn.errors import ConfigError


@pytest.fixture
def type_lines(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def type_lines(*lines: str) -> None:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(line + "\n" for line in lines)))

    return type_lines


def test_chat_line_by_line(
    model_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n\nw7 w8\n" + "w5 " * 60 + "\n"))
    args = ["--temperature", "0", "--max-tokens", "4", "--max-model-len", "64", "--system-prompt", "w3"]
    assert main(["chat", str(model_path), *args]) == 1
    assert "no chat template" in capsys.readouterr().err

    make_model("llama").save_pretrained(tmp_path)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.StringIO("w5 w6\n\nw7 w8\n" + "w5 " * 60 + "\n"))
    assert main(["chat", str(tmp_path), *args]) == 1
    captured = capsys.readouterr()
    first = [token for token in expected("llama", [3, 5, 6], 4) if token > 1]
    second = [token for token in expected("llama", [3, 5, 6, *first, 7, 8], 4) if token > 1]
    assert captured.out.splitlines() == ["".join(f" w{token}" for token in answer) for answer in (first, second)]
    assert "maximum context length is 64" in captured.err


def test_complete_line_by_line(
    model_path: Path, capsys: pytest.CaptureFixture[str], type_lines: Callable[..., None]
) -> None:
    type_lines("w5 w6 w7", "", "w5 " * 64, "w9")
    args = ["--temperature", "0", "--max-tokens", "4", "--max-model-len", "64"]
    assert main(["complete", str(model_path), *args]) == 1
    captured = capsys.readouterr()
    assert captured.out.splitlines() == [continued([5, 6, 7]), continued([9])]
    assert "maximum context length is 64" in captured.err
    assert main(["complete", str(model_path), *args, "-q", "w9"]) == 0
    assert capsys.readouterr().out.splitlines() == [continued([9])]


def continued(prompt: list[int]) -> str:
    return "".join(f" w{token}" for token in expected("llama", prompt, 4) if token > 1)


@pytest.fixture
def ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at the third step of an engine."""
    from vattn.engine.llm import LLM

    step, left = LLM.step, [3]

    def interrupted(llm: LLM) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return step(llm)

    monkeypatch.setattr(LLM, "step", interrupted)


def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    model_path: Path, capsys: pytest.CaptureFixture[str], type_lines: Callable[..., None], ctrl_c: None
) -> None:
    type_lines("w5 w6 w7", "w9")
    assert main(["complete", str(model_path), "--temperature", "0", "--max-tokens", "4", "--max-model-len", "64"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert continued([5, 6, 7]).startswith(first)
    assert len(first) < len(continued([5, 6, 7]))
    assert second == continued([9])


def test_ctrl_c_ends_a_quick_answer_and_the_command(
    model_path: Path, capsys: pytest.CaptureFixture[str], ctrl_c: None
) -> None:
    args = ["--temperature", "0", "--max-tokens", "4", "--max-model-len", "64", "-q", "w5 w6 w7"]
    assert main(["complete", str(model_path), *args]) == 130
    (answer,) = capsys.readouterr().out.splitlines(keepends=True)
    assert answer.endswith("\n")
    assert continued([5, 6, 7]).startswith(answer[:-1])


@contextlib.contextmanager
def answering(answer: Callable[[bytes], bytes]) -> Iterator[str]:
    """A server that answers with these bytes, from those of a request; gives the address."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.sendall(answer(self.request.recv(65536)))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def redirect(url: str) -> bytes:
    return b"HTTP/1.1 302 Found\r\nLocation: %s\r\nContent-Length: 0\r\n\r\n" % url.encode()


def test_chat_with_a_server(capsys: pytest.CaptureFixture[str], type_lines: Callable[..., None]) -> None:
    def answer(body: dict[str, Any]) -> list[bytes]:
        said = body["messages"][-1]["content"]
        return [delta(role="assistant", content=""), delta(content="you "), delta(content=f"said {said}"), DONE]

    server = FakeOpenAI(answer, key="secret")
    type_lines("one", "two")
    with server.in_thread() as url:
        args = ["--url", url, "--api-key", "secret", "--system-prompt", "be brief", "--top-k", "5", "--seed", "3"]
        assert main(["chat", *args]) == 0
    assert capsys.readouterr().out == "you said one\nyou said two\n"
    assert [path for path, _, _ in server.requests] == ["/v1/chat/completions"] * 2
    assert server.requests[1][2] == {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "you said one"},
            {"role": "user", "content": "two"},
        ],
        "stream": True,
        "temperature": 0.7,
        "max_completion_tokens": 512,
        "top_k": 5,
        "seed": 3,
    }


def test_complete_with_a_server(
    capsys: pytest.CaptureFixture[str], type_lines: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def answer(body: dict[str, Any]) -> Any:
        kinds: dict[str, Any] = {
            "refused": refusal(400, "too long"),
            "cut": [text("half")],
            "broken": [text("half"), event(error={"message": "out of memory"}), DONE],
        }
        return kinds.get(body["prompt"]) or [text("a"), text("b"), event(choices=[], usage={}), DONE]

    server = FakeOpenAI(answer, key="secret")
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    type_lines("fine", "refused", "cut", "broken", "fine again")
    with server.in_thread() as url:
        assert (
            main(["complete", "--url", url + "/v1/", "--model-name", "mine", "--max-tokens", "9", "--stop", "x"]) == 1
        )
    captured = capsys.readouterr()
    assert captured.out == "ab\nhalf\nhalf\nab\n"
    errors = captured.err.splitlines()
    assert len(errors) == 3
    for error, message in zip(errors, ("400: too long", "ended its answer early", "out of memory"), strict=True):
        assert error.startswith("vattn: ")
        assert message in error
    assert server.requests[0][2] == {
        "model": "mine",
        "prompt": "fine",
        "stream": True,
        "temperature": 0.0,
        "max_tokens": 9,
        "stop": ["x"],
    }


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["some/model", "--url", "http://localhost:1"], "give one of them, or --model-name with --url"),
        (["--url", "http://localhost:1", "--kv", "paged", "--num-blocks", "3"], "--kv, --num-blocks set up an engine"),
        (["--url", "http://localhost:1"], "no server answers at http://localhost:1/v1"),
        (["--url", "localhost:8000"], "is no address of a server"),
        (["some/model", "--model-name", "x"], "--model-name is for a running server; give its --url too"),
        (["some/model", "--api-key", "x"], "--api-key is for a running server"),
    ],
)
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_here_or_on_a_server(
    refuses: Callable[[list[str], str], None], command: str, args: list[str], message: str
) -> None:
    refuses([command, *args], message)


def test_a_server_that_refuses_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeOpenAI(lambda body: [], key="secret").in_thread() as url:
        assert main(["chat", "--url", url]) == 2
        assert "401: wrong key; give its key with --api-key" in capsys.readouterr().err
        assert main(["chat", "--url", url + "/elsewhere", "--api-key", "secret"]) == 2
        assert "is --url that of an OpenAI-compatible server" in capsys.readouterr().err


def test_a_redirect_takes_the_key_to_no_other_server(refuses: Callable[[list[str], str], None]) -> None:
    asked: list[bytes] = []

    def other(request: bytes) -> bytes:
        asked.append(request)
        return http(b'{"data": []}')

    def same(request: bytes) -> bytes:
        if b"/elsewhere" not in request:
            return redirect("/elsewhere")
        return http(b'{"data": []}' if b"Bearer secret" in request else b"no key")

    with answering(other) as there, answering(lambda request: redirect(f"{there}/v1/models")) as here:
        refuses(["chat", "--url", here, "--api-key", "secret"], f"answers 302: no message; it leads to '{there}")
    assert not asked
    with answering(same) as here:
        refuses(["chat", "--url", here, "--api-key", "secret"], "lists no model; give one with --model-name")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (http(b"<html>"), "no answer that can be read (JSONDecodeError: "),
        (http(b"\xff"), "no answer that can be read (UnicodeDecodeError: "),
        (http(b"[" * 100_000), "no answer that can be read (RecursionError: "),
        (http(b"[1]"), "lists no models; is --url that of"),
        (http(b'{"data": [{}]}'), "lists no models; is --url that of"),
        (http(b'{"data": {"a": 1}}'), "lists no models; is --url that of"),
        (http(b'{"data": [{"id": null}]}'), "lists no models; is --url that of"),
        (b"SSH-2.0-x\r\n", "no answer that can be read (BadStatusLine: "),
        (b"", "no answer that can be read (RemoteDisconnected: "),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n{", "no answer that can be read (IncompleteRead: "),
    ],
)
def test_answers_that_are_none(refuses: Callable[[list[str], str], None], answer: bytes, message: str) -> None:
    with answering(lambda request: answer) as url:
        refuses(["chat", "--url", url], message)


@pytest.mark.parametrize("event", [b"5", b'{"choices": 5}', b'{"choices": [{"delta": {"content": 5}}]}', b"[]"])
def test_chunks_that_are_none(capsys: pytest.CaptureFixture[str], event: bytes) -> None:
    with answering(lambda request: http(b'data: {"choices": null}\n\ndata: %s\n\n' % event)) as url:
        assert main(["chat", "--url", url, "--model-name", "m", "-q", "hi"]) == 1
    assert "which is no chunk of an answer" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["chat", "--url"], ["bench", "serve", "--base-url"]])
def test_a_key_that_no_header_can_have(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret\r")
    for more, name in ([], "OPENAI_API_KEY"), (["--api-key", "secr\u00e9t"], "--api-key"):
        assert main([*command, "http://127.0.0.1:1", *more]) == 2
        error = capsys.readouterr().err
        assert f"vattn: {name} has characters that no header can have" in error
        assert "secr" not in error


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("http://localhost:8000", "http://localhost:8000/v1"),
        ("http://localhost:8000/", "http://localhost:8000/v1"),
        ("https://host/v1/", "https://host/v1"),
        ("https://host/v1beta/openai", "https://host/v1beta/openai"),
    ],
)
def test_the_root_of_an_address(url: str, root: str) -> None:
    assert api_root(url) == root


def test_what_is_no_address() -> None:
    for url in ("host:80", "ftp://host", "http://", "", "http://[::1", "http://host:x", "http://host:0"):
        with pytest.raises(ConfigError, match="is no address"):
            api_root(url)


def test_addresses_that_nothing_can_have(refuses: Callable[[list[str], str], None]) -> None:
    for url in ("http://a b/v1", "http://a..b/v1", "http://localhost/\u00e9"):
        refuses(["chat", "--url", url], f"{url}/models gives no answer that can be read")


def test_input_that_is_none(
    model_path: Path, refuses: Callable[[list[str], str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["complete", str(model_path)]
    monkeypatch.setattr(sys, "stdin", None)
    refuses(command, "there is no standard input")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n"), "utf-8"))
    refuses(command, "the input is no text in utf-8")


def test_a_pipe_that_nobody_reads() -> None:
    code = "import sys; from vattn.engine.cli import main; sys.exit(main(['completion', 'bash']))"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_characters_that_the_terminal_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.BytesIO()
    stdout = io.TextIOWrapper(terminal, "ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    with FakeOpenAI(lambda body: [text("caf\u00e9 \ud800"), DONE]).in_thread() as url:
        assert main(["complete", "--url", url, "-q", "a"]) == 0
    stdout.flush()
    assert terminal.getvalue() == b"caf? ?\n"
