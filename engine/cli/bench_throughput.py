"""`vattn bench throughput`: how fast a queue of requests is worked off."""

from __future__ import annotations

import argparse
import sys
import time

from vattn.errors import ConfigError

from ..checks import checked_whole
from .engine_flags import add_engine_flags, chosen_model, engine_options
from .flags import Commands, Help
from .load import add_offline_flags, add_sample_flags, make_samples, write_json
from .sampling_flags import SAMPLING


def add_to(commands: Commands) -> None:
    """Add `throughput`."""
    parser = commands.add_parser(
        "throughput", help="tokens per second of a queue, in this process", formatter_class=Help
    )
    add_offline_flags(parser)
    parser.add_argument("--num-warmups", type=int, default=0, help="requests that run before, and are not counted")
    parser.add_argument("--temperature", type=SAMPLING["temperature"].parse, default=1.0, help="0 is greedy")
    add_sample_flags(parser)
    add_engine_flags(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    checked_whole("num_warmups", args.num_warmups, 0)
    options = engine_options(args)

    from ..llm import LLM
    from ..requests.sampling import SamplingParams

    model = chosen_model(args.model)
    with LLM(model, **options) as llm:
        assert llm.tokenizer is not None
        samples = make_samples(args, llm.tokenizer, args.num_prompts, seed=options.get("seed", 0))
        longest = max(sample.prompt_len + sample.output_len for sample in samples)
        if longest > (limit := llm.core.loaded.max_model_len):
            raise ConfigError(
                f"a request has {longest} tokens of prompt and answer, over the model's {limit}; "
                "give a smaller --input-len or --output-len"
            )

        def params(tokens: int) -> SamplingParams:
            return SamplingParams(
                n=args.n,
                temperature=args.temperature,
                ignore_eos=True,
                max_tokens=tokens,
                detokenize=not args.disable_detokenize,
            )

        if args.num_warmups:
            others = make_samples(args, llm.tokenizer, args.num_warmups, seed=options.get("seed", 0) + 1)
            llm.generate(
                [sample.prompt for sample in others], [params(sample.output_len) for sample in others], use_tqdm=False
            )
            llm.reset_prefix_cache()  # a file has no other requests
        start = time.perf_counter()
        outputs = llm.generate([sample.prompt for sample in samples], [params(sample.output_len) for sample in samples])
        seconds = time.perf_counter() - start

    failed = [output for output in outputs if output.error is not None]
    if failed:
        print(f"vattn: {len(failed)} requests failed, the first with: {failed[0].error}", file=sys.stderr)
        return 1
    prompt_tokens = sum(len(output.prompt_token_ids) for output in outputs)
    output_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    tokens = prompt_tokens + output_tokens
    print(
        f"Throughput: {len(samples) / seconds:.2f} requests/s, {tokens / seconds:.2f} total tokens/s, "
        f"{output_tokens / seconds:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {prompt_tokens}")
    print(f"Total num output tokens:  {output_tokens}")
    if args.output_json is not None:
        write_json(
            args.output_json,
            {
                "model_id": model,
                "elapsed_time": seconds,
                "num_requests": len(samples),
                "total_num_tokens": tokens,
                "requests_per_second": len(samples) / seconds,
                "tokens_per_second": tokens / seconds,
            },
        )
    return 0
