"""The `vattn` command: `doctor`, `generate` and `chat`."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vattn.engine.config import EngineConfig
from vattn.engine.kv.make import BACKENDS
from vattn.errors import VattnError

if TYPE_CHECKING:
    from vattn.engine.llm import LLM
    from vattn.engine.requests.sampling import RequestOutputKind, SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 if a request failed, 2 for a bad argument, 130 for Ctrl-C."""
    args = parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (VattnError, OSError) as error:  # OSError: transformers' "no such model"
        print(f"vattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


class _Help(argparse.ArgumentDefaultsHelpFormatter):
    """States the default of every flag that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default is None else super()._get_help_string(action)


def parser() -> argparse.ArgumentParser:
    """The commands, with a flag for every field of `EngineConfig` that has one."""
    parser = argparse.ArgumentParser(
        prog="vattn", description="KV-cache memory on demand, contiguous in virtual memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine offers, and what would be used")
    doctor.set_defaults(run=_doctor)

    generate = commands.add_parser("generate", help="run prompts through a model", formatter_class=_Help)
    generate.add_argument("model", metavar="MODEL", help="path or hub id")
    generate.add_argument("prompts", metavar="PROMPT", nargs="+")
    generate.add_argument("-n", type=int, default=1, help="completions per prompt")
    generate.add_argument("--no-progress", action="store_true", help="no progress bar")
    _add_sampling_flags(generate, temperature=0.0, max_tokens=64)
    _add_engine_flags(generate, kv=(*BACKENDS, "both"))
    generate.set_defaults(run=_generate)

    chat = commands.add_parser("chat", help="talk to a model, line by line", formatter_class=_Help)
    chat.add_argument("model", metavar="MODEL", help="path or hub id of a model with a chat template")
    chat.add_argument("--system", metavar="TEXT", help="a system message to begin with")
    _add_sampling_flags(chat, temperature=0.7, max_tokens=512)
    _add_engine_flags(chat, kv=BACKENDS)
    chat.set_defaults(run=_chat, n=1, max_num_seqs=1)
    return parser


def _add_sampling_flags(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int) -> None:
    parser.add_argument("--max-tokens", type=int, default=max_tokens, help="maximum number of output tokens")
    parser.add_argument("--min-tokens", type=int, default=0, help="minimum number of output tokens")
    parser.add_argument("--temperature", type=float, default=temperature, help="0 is greedy")
    parser.add_argument("--top-p", type=float, default=1.0, help="share of probability to sample from")
    parser.add_argument("--top-k", type=int, default=0, help="tokens to sample from; 0 for all")
    parser.add_argument("--min-p", type=float, default=0.0, help="least probability, as a share of the largest")
    parser.add_argument("--presence-penalty", type=float, default=0.0)
    parser.add_argument("--frequency-penalty", type=float, default=0.0)
    parser.add_argument("--repetition-penalty", type=float, default=1.0)
    parser.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="text that ends the output; may be repeated"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="continue to --max-tokens")


def _add_engine_flags(parser: argparse.ArgumentParser, *, kv: Sequence[str]) -> None:
    """Add the flags of `EngineConfig`, with the choices `kv` for `--kv`."""
    for field, flag in EngineConfig.flags().items():
        name = "--" + (flag.name or field.name.replace("_", "-"))
        how: dict[str, Any] = {"dest": field.name, "default": field.default, "help": flag.help}
        if isinstance(field.default, bool):
            how["action"] = argparse.BooleanOptionalAction if field.default else "store_true"
        else:
            how["type"] = flag.parse
            how["choices"] = kv if field.name == "kv" else flag.choices
            how["metavar"] = flag.metavar
        parser.add_argument(name, **how)


def _sampling_params(args: argparse.Namespace, output_kind: RequestOutputKind | None = None) -> SamplingParams:
    from vattn.engine.requests.sampling import SamplingParams

    return SamplingParams(
        n=args.n,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        min_p=args.min_p,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        repetition_penalty=args.repetition_penalty,
        seed=args.seed,
        stop=args.stop,
        ignore_eos=args.ignore_eos,
        max_tokens=args.max_tokens,
        min_tokens=args.min_tokens,
        output_kind=output_kind,
    )


def _make_llm(args: argparse.Namespace, kv: str) -> LLM:
    # Here, so that `vattn --help` and `vattn doctor` do not load transformers.
    from vattn.engine.llm import LLM

    options = {field.name: getattr(args, field.name) for field in EngineConfig.flags()}
    return LLM(args.model, **{**options, "kv": kv})


def _doctor(args: argparse.Namespace) -> int:
    from vattn.doctor import doctor

    print(doctor())
    return 0


def _generate(args: argparse.Namespace) -> int:
    params = _sampling_params(args)
    texts: list[list[str]] = []
    failed = False
    for kv in ("virtual", "paged") if args.kv == "both" else (args.kv,):
        with _make_llm(args, kv) as llm:
            start = time.monotonic()
            outputs = llm.generate(args.prompts, params, use_tqdm=not args.no_progress)
            seconds = time.monotonic() - start
        total = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        print(f"== {kv}: {total} tokens in {seconds:.2f} s, {total / seconds:.1f} tokens/s")
        for output in outputs:
            metrics = output.metrics
            for completion in output.outputs:
                name = output.request_id if args.n == 1 else f"{output.request_id}, {completion.index}"
                print(
                    f"-- [{name}] {len(output.prompt_token_ids)} prompt + "
                    f"{len(completion.token_ids)} output tokens, {completion.finish_reason}, "
                    f"first token {metrics.time_to_first_token or 0:.3f} s, total {metrics.latency or 0:.3f} s"
                )
                print(output.prompt, completion.text, sep="")
            if output.error is not None:
                failed = True
                print(f"vattn: request {output.request_id} failed: {output.error}", file=sys.stderr)
        texts.append([completion.text for output in outputs for completion in output.outputs])
    if len(texts) == 2:
        print(f"== the two backends gave {'the same' if texts[0] == texts[1] else 'different'} text")
    return 1 if failed else 0


def _chat(args: argparse.Namespace) -> int:
    from vattn.engine.requests.request import InvalidRequest
    from vattn.engine.requests.sampling import RequestOutputKind

    params = _sampling_params(args, RequestOutputKind.DELTA)
    messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    failed = False
    with _make_llm(args, args.kv) as llm:
        for line in _lines():
            asked = [*messages, {"role": "user", "content": line}]
            try:
                llm.add_request("chat", llm.prompts.apply_chat_template(asked), params)
            except InvalidRequest as error:
                # The conversation continues without this line: the next one may be shorter.
                failed = True
                print(f"vattn: {error}", file=sys.stderr)
                continue
            answer, failure = _stream(llm)
            if failure is None:
                messages = [*asked, {"role": "assistant", "content": answer}]
            else:
                failed = True
                print(f"vattn: the request failed: {failure}", file=sys.stderr)
    return 1 if failed else 0


def _stream(llm: LLM) -> tuple[str, BaseException | None]:
    """Print the text of the only request as it comes; Ctrl-C ends it. Returns the text, and the error if it failed."""
    texts: list[str] = []
    error = None
    try:
        while llm.has_unfinished():
            for output in llm.step():
                error = output.error
                for completion in output.outputs:
                    texts.append(completion.text)
                    print(completion.text, end="", flush=True)
    except KeyboardInterrupt:
        llm.abort("chat")
    print()
    return "".join(texts), error


def _lines() -> Iterator[str]:
    """The lines that the user types, but for empty ones, until the end of input; a terminal gets a prompt."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return
        if line.strip():
            yield line


if __name__ == "__main__":
    raise SystemExit(main())
