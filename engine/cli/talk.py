"""Talking to a model line by line: what `chat` and `complete` share."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from vattn.errors import ConfigError

from .engine_flags import add_engine_flags, add_model, chosen_model, engine_options, given_engine_flags
from .remote import AnswerFailed, RemoteModel
from .sampling_flags import add_sampling_flags, sampling_options

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests.prompts import Prompt
    from ..requests.sampling import SamplingParams


class Model(Protocol):
    """What answers, here or on a server. Closing an iterator ends the request."""

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str]: ...

    def complete(self, prompt: str) -> Generator[str]: ...


def add_talk_flags(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int, model: str) -> None:
    """Add the flags of a model that is run here or asked on a server."""
    add_model(parser, model)
    remote = parser.add_argument_group("a running server, instead of a MODEL")
    remote.add_argument("--url", help="address of an OpenAI-compatible server: http://localhost:8000")
    remote.add_argument("--model-name", metavar="NAME", help="of the server's models; default: the first that it lists")
    remote.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    parser.add_argument("-q", "--quick", metavar="TEXT", help="answer this line, and exit")
    add_sampling_flags(parser, temperature=temperature, max_tokens=max_tokens)
    add_engine_flags(parser, changed={"max_num_seqs": 1})


@contextlib.contextmanager
def chosen(args: argparse.Namespace) -> Generator[Model]:
    """The model that the flags name, here or on a server.

    Raises:
        ConfigError: flags of both.
    """
    if args.url is None:
        for flag, value in (("--model-name", args.model_name), ("--api-key", args.api_key)):
            if value is not None:
                raise ConfigError(f"{flag} is for a running server; give its --url too")
        options = {"max_num_seqs": 1, **engine_options(args)}

        # Here, so that talking to a server does not load transformers.
        from ..llm import LLM
        from ..requests.sampling import RequestOutputKind, SamplingParams

        params = SamplingParams(**sampling_options(args), output_kind=RequestOutputKind.DELTA)
        with LLM(chosen_model(args.model), **options) as llm:
            yield _LocalModel(llm, params)
        return

    if args.model is not None:
        raise ConfigError("MODEL is run here, and --url asks a server; give one of them, or --model-name with --url")
    flags = given_engine_flags(args, but=("seed",))
    if flags:
        raise ConfigError(
            f"{', '.join(flags)} set up an engine, but --url asks one that runs; leave them out, or give them to "
            "`vattn serve`"
        )

    yield RemoteModel(args.url, args.model_name, args.api_key, sampling_options(args))


def talk(args: argparse.Namespace, answer: Callable[[str], Generator[str]], heard: Callable[[str, str], None]) -> int:
    """Answer the lines that the user types, as they come. Ctrl-C ends an answer, and with `--quick` the command.

    Args:
        answer: from a line to the pieces of its answer.
        heard: called with a line and its answer.

    Returns:
        The exit status: 1 if a line failed.
    """
    failed = False
    for line in _lines() if args.quick is None else [args.quick]:
        texts: list[str] = []
        with contextlib.closing(answer(line)) as pieces:
            try:
                for text in pieces:
                    texts.append(text)
                    print(text, end="", flush=True)
            except KeyboardInterrupt:
                if args.quick is not None:
                    print()
                    raise
            except AnswerFailed as error:
                # The conversation continues without this line: the next one may be shorter.
                failed = True
                if texts:
                    print()
                print(f"vattn: {error}", file=sys.stderr)
                continue
        print()
        heard(line, "".join(texts))
    return 1 if failed else 0


class _LocalModel:
    """An engine in this process, one request at a time."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self._llm, self._params = llm, params

    def chat(self, messages: Sequence[Mapping[str, str]]) -> Generator[str]:
        from ..requests.request import InvalidRequest

        try:
            prompt = self._llm.prompts.apply_chat_template(messages)
        except InvalidRequest as error:
            raise AnswerFailed(str(error)) from error
        yield from self.complete(prompt)

    def complete(self, prompt: Prompt) -> Generator[str]:
        from ..requests.request import InvalidRequest

        try:
            self._llm.add_request("line", prompt, self._params)
        except InvalidRequest as error:
            raise AnswerFailed(str(error)) from error
        try:
            while self._llm.has_unfinished():
                for output in self._llm.step():
                    yield from (completion.text for completion in output.outputs)
                    if output.error is not None:
                        raise AnswerFailed(f"the request failed: {output.error}")
        finally:
            self._llm.abort("line")


def _lines() -> Iterator[str]:
    """The lines that the user types, but for empty ones, until the end of input; a terminal gets a prompt."""
    if sys.stdin is None:
        raise ConfigError("there is no standard input to read lines from; give one, or a line with --quick")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        except UnicodeDecodeError as error:
            raise ConfigError(f"the input is no text in {error.encoding} ({error.reason}); convert it first") from error
        if line.strip():
            yield line
