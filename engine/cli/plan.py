"""`vattn plan`: what fits, paged and virtual, before there is a machine."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vattn.errors import ConfigError

if TYPE_CHECKING:
    from vattn.plan import Option, Plan

    from .flags import Commands

_BLOCK_SIZES = "16,32,64,128"

# Names under which traces have the tokens of a prompt and of its answer: OpenAI's usage, ours, Mooncake's.
_PROMPT = ("prompt_tokens", "prompt_len", "input_tokens", "input_length")
_OUTPUT = ("completion_tokens", "output_tokens", "output_len", "output_length")

_NOTES = """\
longest, typical: requests that fit at a time, of the longest and of the given lengths
unused: of what a request holds, on average and at most
table: the block table that kernels read; or the page table, which the hardware reads
maps: pages mapped per token; parked and stocked pages save calls\
"""


def add_to(commands: Commands, help: str) -> None:
    """Add `plan`."""
    parser = commands.add_parser(
        "plan",
        help=help,
        description="Compare the ways to hold a KV cache: paged by block size, virtual by layout and page size. It is "
        "arithmetic; no GPU is needed. All sizes are those of one GPU.",
    )
    parser.add_argument(
        "model", help="a transformers config (path or hub id), or a shape by name: Llama-3-8B, Yi-34B, ..."
    )
    parser.add_argument(
        "--memory", "--kv-cache-memory-bytes", required=True, help="memory for the cache on each GPU, such as 40GiB"
    )
    parser.add_argument(
        "--max-len",
        "--max-model-len",
        type=int,
        metavar="TOKENS",
        help="most tokens of a request; default: the model's limit",
    )
    parser.add_argument(
        "--batch",
        "--max-num-seqs",
        type=int,
        default=64,
        metavar="REQUESTS",
        help="most requests at a time; default: 64",
    )
    parser.add_argument(
        "--tp",
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="GPUS",
        help="GPUs that share the K/V heads; default: 1",
    )
    parser.add_argument("--dtype", help="element type of the cache, such as float8_e4m3fn; default: the model's")
    parser.add_argument(
        "--lengths",
        type=Path,
        metavar="FILE",
        help="lengths of requests, as JSON or JSON lines: numbers, objects with prompt_tokens and completion_tokens, "
        "or a result of `vattn bench serve --save-detailed`; default: all lengths are as likely",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    parser.add_argument(
        "--block-sizes", default=_BLOCK_SIZES, metavar="TOKENS,...", help=f"of paged; default: {_BLOCK_SIZES}"
    )
    parser.add_argument("--page-sizes", metavar="SIZE,...", help="of virtual; default: 64KiB to 2MiB")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from vattn.model_shapes import find_shape
    from vattn.plan import PAGE_SIZES, plan
    from vattn.units import format_bytes, parse_bytes

    block_sizes = _numbers("--block-sizes", args.block_sizes, int)
    page_sizes: Sequence[int] = PAGE_SIZES
    if args.page_sizes is not None:
        page_sizes = _numbers("--page-sizes", args.page_sizes, lambda text: parse_bytes(text, "--page-sizes"))
    memory = parse_bytes(args.memory, "--memory")
    lengths = None if args.lengths is None else read_lengths(args.lengths)
    shape = find_shape(args.model, tensor_parallel=args.tp, dtype=args.dtype, max_context_len=args.max_len)
    longest = shape.max_context_len if args.max_len is None else args.max_len
    if longest is None:
        raise ConfigError(f"the config of {args.model!r} has no limit; give the longest request as --max-len")
    found = plan(
        shape.groups,
        memory=memory,
        max_context_len=longest,
        max_batch_size=args.batch,
        lengths=lengths,
        device=args.device,
        block_sizes=block_sizes,
        page_sizes=page_sizes,
    )
    if args.json:
        print(json.dumps({"model": str(shape), "tensor_parallel": args.tp, **found.to_dict()}, indent=1))
        return 0
    per = f"{format_bytes(found.token_bytes)} per token" + (f" on each of {args.tp} GPUs" if args.tp > 1 else "")
    kind = "all lengths as likely" if lengths is None else f"{len(lengths):,} requests of {args.lengths}"
    print(f"{shape}: {per}")
    print(
        f"{format_bytes(memory)}, {args.batch:,} requests at a time of up to {longest:,} tokens; {kind}, "
        f"{found.mean_tokens:,.0f} tokens on average\n"
    )
    print("\n".join(_table(found)))
    print(f"\n{_NOTES}")
    if not all(option.offered for option in found.options):
        print("*: not in this device's driver")
    print(f"\nRecommended: {found.recommended}. {found.reason}")
    return 0


def read_lengths(path: Path) -> list[int]:
    """The tokens of each request of a trace, prompt and answer together.

    Raises:
        ConfigError: the file has no lengths; the message says what is expected.
        OSError: it cannot be read.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"{path} {what}; give numbers of tokens, or objects with {_PROMPT[0]} and {_OUTPUT[0]}, as a JSON array or "
            "one per line"
        )

    try:
        text = path.read_text(encoding="utf-8")
        try:
            items = json.loads(text)
        except json.JSONDecodeError:
            # Not by `splitlines`, which also splits at characters that JSON may have in its strings.
            items = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (ValueError, RecursionError) as error:  # also of bytes that are no UTF-8, and of endless numbers
        raise refuse(f"is not JSON that can be read ({error})") from error
    if isinstance(items, dict) and {"input_lens", "output_lens"} <= items.keys():
        prompts, outputs = items["input_lens"], items["output_lens"]
        if not isinstance(prompts, list) or not isinstance(outputs, list):
            raise refuse("is no result: input_lens and output_lens are not both lists")
        if len(prompts) != len(outputs):
            raise refuse("is no result: input_lens and output_lens differ in number")
        items = [{_PROMPT[0]: prompt, _OUTPUT[0]: output} for prompt, output in zip(prompts, outputs, strict=True)]
    elif not isinstance(items, list):
        items = [items]  # a file of one line
    if not items:
        raise refuse("is empty")
    lengths = [_length(item) for item in items]
    if None in lengths:
        raise refuse(f"has no length in place {lengths.index(None) + 1}")
    return [length for length in lengths if length is not None]


def _length(item: object) -> int | None:
    """The tokens of an entry of a trace; None if it says none."""
    if isinstance(item, dict):
        prompt, output = (next((item[name] for name in names if name in item), 0) for names in (_PROMPT, _OUTPUT))
        parts = [prompt, output]
    else:
        parts = [item]
    if not all(type(part) is int and part >= 0 for part in parts) or not sum(parts):
        return None
    return sum(parts)


def _numbers(flag: str, text: str, parse: Callable[[str], int]) -> list[int]:
    try:
        return [parse(part) for part in text.split(",")]
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r}: {error}; give values with commas between them") from error


def _table(plan: Plan) -> Iterator[str]:
    from vattn.units import format_bytes

    def cells(option: Option) -> list[str]:
        virtual = option.kind == "virtual"
        name = f"virtual, {option.layout}" if virtual else "paged"
        return [
            f"{'> ' if option == plan.recommended else '  '}{name}",
            f"{format_bytes(option.page_size)}{'' if option.offered else '*'}",
            f"{option.block_tokens:,}",
            f"{option.longest_requests:,}",
            f"{option.typical_requests:,}",
            format_bytes(option.mean_waste),
            f"{100 * option.mean_waste / option.held_bytes:.1f} %",
            format_bytes(option.worst_waste),
            format_bytes(option.table_bytes),
            format_bytes(option.address_bytes),
            f"{option.map_calls_per_token:.3g}" if virtual else "-",
            "-" if option.mappings is None else f"{option.mappings:,}",
        ]

    header = ["", "page", "tokens", "longest", "typical", "unused", "", "at most", "table", "addresses", "maps"]
    rows = [[*header, "mappings"], *map(cells, plan.options)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join([row[0].ljust(len(first)), *others]).rstrip()
