"""`vattn bench serve`: a running OpenAI-compatible server under load."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import math
import resource
import sys
import time
from collections.abc import Callable, Generator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from vattn.errors import ConfigError
from vattn.integers import shown

from ..checks import checked_whole
from ..options import json_value
from .extras import require_server_extra
from .flags import Commands, Help, flag_name
from .load import add_sample_flags, make_samples, write_json
from .remote import key_to_send
from .sampling_flags import SAMPLING

if TYPE_CHECKING:
    from ..loadgen.client import Target
    from ..loadgen.samples import Sample
    from ..loadgen.summary import Timing

_T = TypeVar("_T")

_RETRY_SECONDS = 1.0
# Fields of a request that are sent only where they are given: the server has its own defaults.
_SENT = {name: option for name, option in SAMPLING.items() if name not in ("max_tokens", "min_tokens")}


def add_to(commands: Commands) -> None:
    """Add `serve`."""
    parser = commands.add_parser("serve", help="a running OpenAI-compatible server under load", formatter_class=Help)
    parser.add_argument("--base-url", metavar="URL", help="address of the server, instead of --host and --port")
    parser.add_argument("--host", default="127.0.0.1", help="the server's host")
    parser.add_argument("--port", type=int, default=8000, help="the server's port")
    parser.add_argument("--backend", choices=("openai", "openai-chat"), default="openai", help="completions, or chat")
    parser.add_argument("--endpoint", metavar="PATH", help="default: /v1/completions or /v1/chat/completions")
    parser.add_argument("--model", metavar="NAME", help="its name on the server; default: the first that it lists")
    parser.add_argument("--tokenizer", metavar="PATH", help="to make and count prompts; default: the model's")
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code of the tokenizer")
    parser.add_argument("--api-key", metavar="KEY", help="default: OPENAI_API_KEY of the environment")
    parser.add_argument(
        "--ready-check-timeout-sec",
        type=int,
        default=0,
        metavar="SECONDS",
        help="longest wait for a request to succeed before the measurement; 0: no such request",
    )
    add_sample_flags(parser)

    traffic = parser.add_argument_group("traffic")
    traffic.add_argument(
        "--request-rate", type=float, default=math.inf, metavar="RATE", help="requests per second; inf: all at once"
    )
    traffic.add_argument(
        "--burstiness",
        type=float,
        default=1.0,
        help="1 is a Poisson process; less comes in bursts, more is more even (with --request-rate)",
    )
    traffic.add_argument("--max-concurrency", type=int, help="maximum number of requests at a time")
    traffic.add_argument("--num-warmups", type=int, default=0, help="requests that run before, and are not counted")
    traffic.add_argument("--seed", type=int, default=0, help="of prompts and arrival times")
    traffic.add_argument("--disable-tqdm", action="store_true", help="no progress bar")

    sampling = parser.add_argument_group("sampling; the server's defaults otherwise")
    for name, option in _SENT.items():
        sampling.add_argument(flag_name(name, option), type=option.parse, help=option.help)
    sampling.add_argument("--ignore-eos", action="store_true", help="answers have exactly the length asked for")
    sampling.add_argument("--extra-body", type=json_value, metavar="JSON", help="further fields of each request")

    results = parser.add_argument_group("results")
    results.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="which of ttft,tpot,itl,e2el to report"
    )
    results.add_argument("--metric-percentiles", default="99", metavar="NUMBERS", help="percentiles, such as 50,90,99")
    results.add_argument(
        "--goodput", nargs="+", metavar="NAME:MS", help="objectives: requests per second that meet all, as ttft:200"
    )
    results.add_argument("--save-result", action="store_true", help="write the results as JSON")
    results.add_argument("--save-detailed", action="store_true", help="with those of each request")
    results.add_argument("--result-dir", type=Path, metavar="DIR", help="where; default: the current directory")
    results.add_argument("--result-filename", metavar="FILE", help="default: named after backend, rate, model and time")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    require_server_extra("vattn bench serve")
    from ..loadgen.arrivals import arrival_times
    from ..loadgen.summary import DETAILS, parse_goodput, parse_metrics, parse_percentiles, summarize, table

    metrics, percentiles = parse_metrics(args.percentile_metrics), parse_percentiles(args.metric_percentiles)
    goodput = parse_goodput(args.goodput or ())
    checked_whole("num_warmups", args.num_warmups, 0)
    checked_whole("ready_check_timeout_sec", args.ready_check_timeout_sec, 0)
    if args.max_concurrency is not None:
        checked_whole("max_concurrency", args.max_concurrency, 1)
    arrivals = arrival_times(
        checked_whole("num_prompts", args.num_prompts, 1), args.request_rate, args.burstiness, args.seed
    )
    deadline = time.monotonic() + args.ready_check_timeout_sec
    target, tokenizer = _target(args, deadline)
    samples = make_samples(args, _load_tokenizer(tokenizer, args.trust_remote_code), args.num_prompts, args.seed)
    if args.ready_check_timeout_sec:
        _until(deadline, lambda: _send_one(target, samples[0]))

    timings, duration = _measure(args, target, samples, arrivals)
    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    # JSON has no infinity.
    rate, burstiness = ("inf" if math.isinf(given) else given for given in (args.request_rate, args.burstiness))
    result: dict[str, Any] = {
        "date": now,
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.backend,
        "model_id": target.model,
        "tokenizer_id": tokenizer,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": burstiness,
        "max_concurrency": args.max_concurrency,
        **summarize(timings, duration, metrics=metrics, percentiles=percentiles, goodput=goodput),
    }
    for error in [error for error in result["errors"] if error][:10]:
        print(f"vattn: a request failed: {error}", file=sys.stderr)
    print(table(result))
    if args.save_result or args.save_detailed:
        if not args.save_detailed:
            result = {key: value for key, value in result.items() if key not in DETAILS}
        limit = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
        name = args.result_filename or f"{args.backend}-{rate}qps{limit}-{target.model.split('/')[-1]}-{now}.json"
        path = Path(args.result_dir or ".", name)
        write_json(path, result)
        print(f"written to {path}")
    return 1 if result["failed"] else 0


def _target(args: argparse.Namespace, deadline: float) -> tuple[Target, str]:
    """Where requests go, and the tokenizer that belongs there; until `deadline` for a server to say so."""
    from ..loadgen.client import ENDPOINTS, Target

    extra = args.extra_body or {}
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra-body is {shown(extra)}; give a JSON object of fields")
    key = key_to_send(args.api_key)
    base_url = args.base_url
    if base_url is None:
        base_url = f"http://{f'[{args.host}]' if ':' in args.host else args.host}:{args.port}"
    base_url = base_url.rstrip("/")
    root = base_url.removesuffix("/v1")
    endpoint = (args.endpoint or ENDPOINTS[args.backend]).lstrip("/")
    model, tokenizer = args.model, args.tokenizer
    if model is None or tokenizer is None:
        listed = _until(deadline, lambda: _list_models(root, key))
        model = model or next(iter(listed))
        tokenizer = tokenizer or listed.get(model, {}).get("root") or model
    fields = {name: getattr(args, name) for name in _SENT if getattr(args, name) is not None}
    if args.ignore_eos:
        fields["ignore_eos"] = True
    target = Target(
        url=f"{root if endpoint.startswith('v1/') else base_url}/{endpoint}",
        model=model,
        backend=args.backend,
        api_key=key,
        fields={**fields, **extra},
    )
    return target, tokenizer


def _list_models(root: str, key: str | None) -> dict[str, dict[str, Any]]:
    """What a server says of its models, by name."""
    from ..loadgen.client import list_models

    listed = {each["id"]: each for each in asyncio.run(list_models(root, key))}
    if not listed:
        raise ConfigError(f"{root} lists no model; give one with --model")
    return listed


def _send_one(target: Target, sample: Sample) -> None:
    from ..loadgen.client import send_all

    (timing,), _ = asyncio.run(send_all(target, [sample], [0.0]))
    if timing.error is not None:
        raise ConfigError(f"{target.url} does not answer a request: {timing.error}")


def _until(deadline: float, attempt: Callable[[], _T]) -> _T:
    """What `attempt` returns. If it raises a ConfigError, it is called again until `deadline`."""
    said = ""
    while True:
        try:
            return attempt()
        except ConfigError as error:
            left = deadline - time.monotonic()
            if left <= 0:
                raise
            what, _, _ = str(error).partition("; ")  # without what to do about it
            if what != said:
                print(f"vattn: waiting, since {what}", file=sys.stderr)
                said = what
            time.sleep(min(left, _RETRY_SECONDS))


def _load_tokenizer(name: str, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ConfigError(f"no tokenizer at {name!r}; give its path or hub id with --tokenizer ({error})") from error


def _measure(
    args: argparse.Namespace, target: Target, samples: list[Any], arrivals: list[float]
) -> tuple[list[Timing], float]:
    import uvloop  # half the CPU time per token of asyncio's own loop; a server on the same machine has the rest
    from tqdm import tqdm  # type: ignore[import-untyped]

    from ..loadgen.client import send_all

    with (
        _at_its_best(),
        tqdm(total=len(samples), unit="req", disable=args.disable_tqdm) as bar,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(
            send_all(
                target,
                samples,
                arrivals,
                max_concurrency=args.max_concurrency,
                warmups=args.num_warmups,
                done=bar.update,
            )
        )


@contextlib.contextmanager
def _at_its_best() -> Generator[None]:
    """As many connections as the system allows, and no garbage collection that looks at all that was imported."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
