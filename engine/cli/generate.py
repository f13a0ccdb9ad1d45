"""`vattn generate`."""

from __future__ import annotations

import argparse
import sys
import time

from .engine_flags import add_engine_flags, chosen_backends, engine_options
from .flags import Commands, Help
from .sampling_flags import add_sampling_flags, sampling_options


def add_to(commands: Commands, help: str) -> None:
    """Add `generate`."""
    parser = commands.add_parser("generate", help=help, formatter_class=Help)
    parser.add_argument("model", metavar="MODEL", help="path or hub id")
    parser.add_argument("prompts", metavar="PROMPT", nargs="+")
    parser.add_argument("-n", type=int, default=1, help="completions per prompt")
    parser.add_argument("--no-progress", action="store_true", help="no progress bar")
    add_sampling_flags(parser, temperature=0.0, max_tokens=64)
    add_engine_flags(parser, both=True)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    runs = {kv: engine_options(args, kv) for kv in chosen_backends(args)}

    # Here, so that `vattn --help` and `vattn doctor` do not load transformers.
    from ..llm import LLM
    from ..requests.sampling import SamplingParams

    params = SamplingParams(n=args.n, **sampling_options(args))
    texts: list[list[str]] = []
    failed = False
    for kv, options in runs.items():
        with LLM(args.model, **options) as llm:
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
