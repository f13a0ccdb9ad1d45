"""`vattn bench latency`: how long one batch of requests takes."""

from __future__ import annotations

import argparse
import functools
import sys
import time
from typing import Any

from vattn.errors import ConfigError, VattnError

from ..checks import checked_whole
from .engine_flags import add_engine_flags, chosen_model, engine_options
from .flags import Commands, Help
from .load import add_offline_flags, write_json

# With it, all batches but the first would find their prompts in the cache.
_CHANGED = {"enable_prefix_caching": False}
_PERCENTILES = (10, 25, 50, 75, 90, 99)


class _RequestFailed(VattnError):
    """A batch without all of its answers has no latency."""


def add_to(commands: Commands) -> None:
    """Add `latency`."""
    parser = commands.add_parser("latency", help="the seconds of one batch, in this process", formatter_class=Help)
    add_offline_flags(parser)
    parser.add_argument("--input-len", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--batch-size", type=int, default=8, help="prompts of a batch")
    parser.add_argument("--num-iters-warmup", type=int, default=10, help="batches that are not counted")
    parser.add_argument("--num-iters", type=int, default=30, help="batches that are")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bars")
    add_engine_flags(parser, changed=_CHANGED)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..loadgen.samples import MOST

    for name, least in (("input_len", 1), ("output_len", 1), ("batch_size", 1), ("num_iters", 1)):
        checked_whole(name, getattr(args, name), least, MOST)
    checked_whole("num_iters_warmup", args.num_iters_warmup, 0)
    options = {**_CHANGED, **engine_options(args)}

    import numpy as np
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ..llm import LLM
    from ..requests.sampling import SamplingParams

    params = SamplingParams(
        n=args.n, ignore_eos=True, max_tokens=args.output_len, detokenize=not args.disable_detokenize
    )
    model = chosen_model(args.model)
    with LLM(model, **options) as llm:
        if args.input_len + args.output_len > llm.core.loaded.max_model_len:
            raise ConfigError(
                f"--input-len {args.input_len} and --output-len {args.output_len} are over the model's "
                f"{llm.core.loaded.max_model_len} tokens; give less"
            )
        rng = np.random.default_rng(0)
        prompts: list[Any] = rng.integers(0, llm.core.loaded.vocab_size, (args.batch_size, args.input_len)).tolist()

        bar = False if args.disable_tqdm else functools.partial(tqdm, leave=False)

        def batches(count: int, title: str) -> list[float]:
            latencies = []
            with tqdm(total=count, desc=title, unit="batch", disable=args.disable_tqdm, dynamic_ncols=True) as total:
                for _ in range(count):
                    start = time.perf_counter()
                    outputs = llm.generate(prompts, params, use_tqdm=bar)
                    latencies.append(time.perf_counter() - start)
                    tokens = 0
                    for output in outputs:
                        if output.error is not None:
                            raise _RequestFailed(f"request {output.request_id} failed: {output.error}")
                        tokens += sum(len(completion.token_ids) for completion in output.outputs)
                    total.set_postfix_str(f"output: {tokens / latencies[-1]:.1f} tokens/s", refresh=False)
                    total.update()
            return latencies

        try:
            batches(args.num_iters_warmup, "Warmup batches")
            latencies = batches(args.num_iters, "Measured batches")
        except _RequestFailed as error:
            print(f"vattn: {error}", file=sys.stderr)
            return 1

    percentiles = {percentage: float(np.percentile(latencies, percentage)) for percentage in _PERCENTILES}
    average = float(np.mean(latencies))
    print(f"Avg latency: {average:.6f} seconds")
    for percentage, seconds in percentiles.items():
        print(f"{percentage}% percentile latency: {seconds:.6f} seconds")
    if args.output_json is not None:
        result = {"model_id": model, "avg_latency": average, "latencies": latencies, "percentiles": percentiles}
        write_json(args.output_json, result)
    return 0
