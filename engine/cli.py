"""The `vattn` command.

vattn doctor
vattn generate MODEL "prompt" ["prompt" ...] --kv virtual|paged|static|dynamic|both --scheduling continuous|static
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from engine.kv import BACKENDS
from engine.scheduler import SCHEDULING
from vattn.errors import VattnError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for a request that failed, 2 for an error in what was asked."""
    args = _parser().parse_args(argv)
    try:
        status: int = args.run(args)
    except (VattnError, OSError) as error:  # OSError: transformers' "no such model"
        print(f"vattn: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vattn", description="KV-cache memory on demand, contiguous in virtual memory."
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what this machine offers, and what would be used")
    doctor.set_defaults(run=_doctor)

    generate = commands.add_parser(
        "generate",
        help="run prompts through a model",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    generate.add_argument("model", metavar="MODEL", help="path or hub id")
    generate.add_argument("prompts", metavar="PROMPT", nargs="+")
    generate.add_argument(
        "--kv", choices=(*BACKENDS, "both"), default="virtual", help="KV-cache backend; both: virtual, then paged"
    )
    generate.add_argument(
        "--scheduling", choices=SCHEDULING, default="continuous", help="static: batches that wait for their slowest"
    )
    generate.add_argument("--max-tokens", type=int, default=64, help="output tokens per prompt")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    generate.add_argument("--seed", type=int, default=0)
    generate.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens")
    generate.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    generate.add_argument("--max-model-len", type=int, help="tokens per request; default: the model's")
    generate.add_argument("--max-num-seqs", type=int, default=64, help="requests at a time")
    generate.add_argument("--max-num-batched-tokens", type=int, default=512, help="tokens per step")
    generate.add_argument(
        "--kv-cache-memory-bytes", default="4GiB", metavar="SIZE", help="bytes, text such as 512MiB, or auto"
    )
    generate.add_argument("--block-size", type=int, default=16, help="tokens per block of --kv paged")
    generate.add_argument("--no-progress", action="store_true", help="no progress bar")
    generate.set_defaults(run=_generate)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from vattn import drivers

    print(drivers.doctor())
    return 0


def _generate(args: argparse.Namespace) -> int:
    # Here, so that `vattn --help` and `vattn doctor` do not load transformers.
    from engine.llm import LLM
    from engine.sampling import SamplingParams

    params = SamplingParams(
        temperature=args.temperature,
        max_tokens=args.max_tokens,
        seed=args.seed,
        ignore_eos=args.ignore_eos,
    )
    texts: list[list[str]] = []
    failed = False
    for kv in ("virtual", "paged") if args.kv == "both" else (args.kv,):
        with LLM(
            args.model,
            kv=kv,
            scheduling=args.scheduling,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            max_num_batched_tokens=args.max_num_batched_tokens,
            memory_budget=args.kv_cache_memory_bytes,
            block_size=args.block_size,
            seed=args.seed,
        ) as llm:
            start = time.monotonic()
            outputs = llm.generate(args.prompts, params, use_tqdm=not args.no_progress)
            seconds = time.monotonic() - start
        total = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(f"== {kv}: {total} tokens in {seconds:.2f} s, {total / seconds:.1f} tokens/s")
        for output in outputs:
            completion, metrics = output.outputs[0], output.metrics
            print(
                f"-- [{output.request_id}] {len(output.prompt_token_ids)} prompt + "
                f"{len(completion.token_ids)} output tokens, {completion.finish_reason}, "
                f"first token {metrics.time_to_first_token or 0:.3f} s, total {metrics.latency or 0:.3f} s"
            )
            print(output.prompt, completion.text, sep="")
            if output.error is not None:
                failed = True
                print(f"vattn: request {output.request_id} failed: {output.error}", file=sys.stderr)
        texts.append([output.outputs[0].text for output in outputs])
    if len(texts) == 2:
        print(f"== the two backends gave {'the same' if texts[0] == texts[1] else 'different'} text")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
