"""What the benchmarks ask for: flags of the requests, and results as files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vattn.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..loadgen.samples import Sample

_INPUT_LEN, _OUTPUT_LEN = 1024, 128


def add_sample_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say which requests are made."""
    group = parser.add_argument_group("requests")
    group.add_argument("--num-prompts", type=int, default=1000, help="number of requests")
    group.add_argument(
        "--dataset-name", choices=("random", "sharegpt", "custom"), default="random", help="random tokens, or a file"
    )
    group.add_argument(
        "--dataset-path",
        type=Path,
        metavar="FILE",
        help='JSON lines or a JSON array: {"prompt": ..., "output_tokens": ...}, or {"conversations": [...]}',
    )
    group.add_argument(
        "--random-input-len",
        "--input-len",
        type=int,
        metavar="TOKENS",
        help=f"tokens of a random prompt; default: {_INPUT_LEN}",
    )
    group.add_argument(
        "--random-output-len",
        "--output-len",
        type=int,
        metavar="TOKENS",
        help=f"maximum number of tokens of an answer; default: {_OUTPUT_LEN}, or what the file says",
    )
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="SHARE", help="lengths vary by this share up and down"
    )
    group.add_argument(
        "--random-prefix-len",
        "--prefix-len",
        type=int,
        default=0,
        metavar="TOKENS",
        help="tokens that all random prompts begin with, before --random-input-len",
    )


def make_samples(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, count: int, seed: int) -> list[Sample]:
    """The requests that the flags describe.

    Raises:
        ConfigError: flags that contradict each other, or a file without requests.
    """
    from ..loadgen.samples import random_samples, read_samples

    if args.dataset_name != "random":
        if args.dataset_path is None:
            raise ConfigError(f"--dataset-name {args.dataset_name} is a file; give it as --dataset-path")
        return read_samples(args.dataset_path, tokenizer, count, output_len=args.random_output_len, seed=seed)
    if args.dataset_path is not None:
        raise ConfigError("--dataset-path is given, but --dataset-name is random; give sharegpt or custom")
    return random_samples(
        tokenizer,
        count,
        input_len=_INPUT_LEN if args.random_input_len is None else args.random_input_len,
        output_len=_OUTPUT_LEN if args.random_output_len is None else args.random_output_len,
        range_ratio=args.random_range_ratio,
        prefix_len=args.random_prefix_len,
        seed=seed,
    )


def add_offline_flags(parser: argparse.ArgumentParser) -> None:
    """Add what `latency` and `throughput` share: the model, completions, the file of results."""
    parser.add_argument("--model", metavar="MODEL", help="path or hub id; default: the one that ships with vattn")
    parser.add_argument("-n", "--n", type=int, default=1, help="completions per prompt")
    parser.add_argument("--disable-detokenize", action="store_true", help="leave the output as token ids")
    parser.add_argument("--output-json", type=Path, metavar="FILE", help="write the results there")


def write_json(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result; the file's directory is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=4) + "\n", encoding="utf-8")
