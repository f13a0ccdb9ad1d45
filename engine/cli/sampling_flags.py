"""Flags of the commands that sample: fields of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import Any

from ..options import Option
from .flags import flag_name

SAMPLING = {
    "max_tokens": Option(doc="maximum number of output tokens", parse=int),
    "min_tokens": Option(doc="minimum number of output tokens", parse=int),
    "temperature": Option(doc="0 is greedy", parse=float),
    "top_p": Option(doc="share of probability to sample from", parse=float),
    "top_k": Option(doc="tokens to sample from; 0 for all", parse=int),
    "min_p": Option(doc="least probability, as a share of the largest", parse=float),
    "presence_penalty": Option(doc="taken off the logit of every token that the output has", parse=float),
    "frequency_penalty": Option(doc="taken off once for each time that the output has a token", parse=float),
    "repetition_penalty": Option(doc="divides the logit of every token of prompt or output", parse=float),
}


def add_sampling_flags(parser: argparse.ArgumentParser, *, temperature: float, max_tokens: int) -> None:
    """Add the flags of `SamplingParams`, with the defaults of this command."""
    group = parser.add_argument_group("sampling")
    defaults: dict[str, Any] = {"temperature": temperature, "max_tokens": max_tokens}
    for name, option in SAMPLING.items():
        help = option.help + (f" (default: {defaults[name]})" if name in defaults else "")
        group.add_argument(flag_name(name, option), type=option.parse, default=argparse.SUPPRESS, help=help)
    group.add_argument(
        "--stop",
        action="append",
        default=argparse.SUPPRESS,
        metavar="TEXT",
        help="text that ends the output; may be repeated",
    )
    group.add_argument("--ignore-eos", action="store_true", default=argparse.SUPPRESS, help="continue to --max-tokens")
    parser.set_defaults(sampling=defaults)


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `SamplingParams` that were given, over the defaults of the command."""
    names = (*SAMPLING, "stop", "ignore_eos", "seed")
    return {**args.sampling, **{name: getattr(args, name) for name in names if hasattr(args, name)}}
