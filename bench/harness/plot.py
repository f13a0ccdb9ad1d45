"""python -m bench.harness.plot [--check]: plots and tables from the committed records, and from nothing else.

Reads bench/results/<machine>/<name>.json; writes docs/img/<name>-<machine>.svg, and what stands in README.md and
docs/*.md between

    <!-- bench:NAME -->         and  <!-- /bench:NAME -->          the table of every machine
    <!-- bench:NAME goals -->   and  <!-- /bench:NAME goals -->    its goals, and whether they were met

With --check nothing is written, and the exit status is 1 if anything is stale. A plot carries a digest of what it was
made from, since two versions of matplotlib do not write the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import BENCHMARKS
from bench.harness.report import format_cell

_ROOT = Path(__file__).parents[2]
_MARKED = re.compile(r"(<!-- bench:(\w+)( goals|) -->\n).*?(<!-- /bench:\2\3 -->)", re.DOTALL)
_RELATIONS = {"<=": "at most", ">=": "at least", "==": "exactly"}

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None, root: Path = _ROOT) -> int:
    """Brings documents and plots up to date, or says which are not."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.harness.plot", description="Plots and tables from committed JSON."
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is stale")
    check = parser.parse_args(argv).check
    try:
        records = load(root / "bench" / "results")
        stale = [*_documents(root, records, check), *_plots(root, records, check)]
    except ValueError as error:
        print(f"bench.plot: {error}", file=sys.stderr)
        return 2
    for path in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(root)}")
    return 1 if check and stale else 0


def load(results: Path) -> dict[str, dict[str, Record]]:
    """Records by benchmark and machine.

    Raises:
        ValueError: one is no figure: from --quick, or from a machine that was busy with something else.
    """
    records: dict[str, dict[str, Record]] = {name: {} for name in BENCHMARKS}
    for path in sorted(results.glob("*/*.json")):
        record: Record = json.loads(path.read_text())
        for flaw in ("quick", "contended"):
            if record[flaw]:
                raise ValueError(f"{path} is from a {flaw} run and must not be published; run the benchmark again")
        records[record["name"]][path.parent.name] = record
    return records


def _documents(root: Path, records: dict[str, dict[str, Record]], check: bool) -> list[Path]:
    stale = []
    for path in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        if not path.exists():
            continue
        old = path.read_text()

        def fill(match: re.Match[str], path: Path = path) -> str:
            opening, name, goals, closing = match.groups()
            if not records.get(name):
                raise ValueError(f"{path} asks for benchmark {name!r}, of which there is no record")
            render = _goals if goals else _table
            return opening + "\n\n".join(map(render, records[name].values())) + "\n" + closing

        new = _MARKED.sub(fill, old)
        if new != old:
            stale.append(path)
            if not check:
                path.write_text(new)
    return stale


def _source(record: Record) -> str:
    hardware, torch = record["hardware"], record["versions"]["torch"]
    commit = (record["commit"] or "none")[:10] + (" with changes" if record["dirty"] else "")
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB, "
        f"{record['kernel']}, torch {torch}, commit {commit}, {record['date'][:10]}"
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def _table(record: Record) -> str:
    rows = [[format_cell(value) for value in row.values()] for row in record["figures"]]
    return "\n".join([f"{_source(record)}:", "", *_markdown(list(record["figures"][0]), rows)])


def _goals(record: Record) -> str:
    rows = [
        [
            goal["what"],
            f"{_RELATIONS[goal['relation']]} {goal['bound']:.4g}",
            f"{goal['value']:.4g}",
            "met" if goal["met"] else "not met",
        ]
        for goal in record["goals"]
    ]
    return "\n".join([f"{_source(record)}:", "", *_markdown(["what", "goal", "measured", ""], rows)])


def _plots(root: Path, records: dict[str, dict[str, Record]], check: bool) -> list[Path]:
    stale = []
    for name, by_machine in records.items():
        for machine, record in by_machine.items():
            path = root / "docs" / "img" / f"{name}-{machine}.svg"
            made_from = json.dumps(record, sort_keys=True) + Path(__file__).read_text()
            digest = hashlib.sha256(made_from.encode()).hexdigest()
            if path.exists() and digest in path.read_text():
                continue
            stale.append(path)
            if not check:
                path.parent.mkdir(parents=True, exist_ok=True)
                _draw(record, path, digest)
    return stale


def _draw(record: Record, path: Path, digest: str) -> None:
    # Here, so that --check needs no matplotlib where nothing is stale.
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "vattn"
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    _DRAWINGS[record["name"]](axes, record)
    axes.grid(alpha=0.3)
    axes.legend()
    axes.set_title(_source(record), fontsize=7)
    figure.savefig(path, metadata={"Date": None, "Source": digest})
    pyplot.close(figure)


def _draw_step(axes: Any, record: Record) -> None:
    rows = record["figures"]
    for column, label in (("step us", "vattn step()"), ("block table us", "filling the block table")):
        axes.plot([row["context"] for row in rows], [row[column] for row in rows], marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="tokens per request", ylabel="us per iteration")


def _draw_admission(axes: Any, record: Record) -> None:
    rows = record["figures"]
    for column in list(rows[0])[1:]:
        axes.plot([row["slots"] for row in rows], [row[column] for row in rows], marker="o", label=column[:-3])
    axes.set(xscale="log", xlabel="max_batch_size", ylabel="us per request", ylim=(0, None))


def _draw_overlap(axes: Any, record: Record) -> None:
    for label, latencies in record["series"].items():
        axes.plot(latencies, label=label, linewidth=1)
    axes.set(xlabel="iteration", ylabel="ms", ylim=(0, None))


def _draw_fragmentation(axes: Any, record: Record) -> None:
    rows = record["figures"]
    static, paged = rows[0], rows[1]
    trace = list(static)[-1]
    for backend, order in dict.fromkeys((row["backend"], row["kv order"]) for row in rows[2:]):
        points = [row for row in rows if (row["backend"], row["kv order"]) == (backend, order)]
        sizes, ratios = [row["page KiB"] for row in points], [row[trace] for row in points]
        axes.plot(sizes, ratios, marker="o", label=f"{backend}, {order}")
    axes.axhline(paged[trace], color="black", linestyle="--", label="paged, 16 tokens")
    axes.set(
        xscale="log",
        xlabel="page size in KiB",
        ylabel=f"physical over live bytes, trace '{trace}' (static: {static[trace]:.2f})",
    )


def _draw_windows(axes: Any, record: Record) -> None:
    for model in dict.fromkeys(row["model"] for row in record["figures"]):
        rows = [row for row in record["figures"] if row["model"] == model]
        tokens = [row["tokens"] for row in rows]
        (line,) = axes.plot(tokens, [row["groups MiB"] for row in rows], marker="o", label=f"{model}, groups")
        uniform = [row["uniform MiB"] for row in rows]
        axes.plot(tokens, uniform, linestyle="--", color=line.get_color(), label=f"{model}, every token")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a request", ylabel="MiB that it holds")


def _draw_mla(axes: Any, record: Record) -> None:
    rows = record["figures"]
    for shift, way in ((-0.25, "absorbed"), (0, "expanded"), (0.25, "stored")):
        places = [place + shift for place in range(len(rows))]
        axes.bar(places, [row[f"{way} ms"] for row in rows], width=0.25, label=way)
    axes.set_xticks(range(len(rows)), [f"{row['new tokens']} of {row['context']}" for row in rows])
    axes.set(yscale="log", xlabel="new tokens of a context", ylabel="ms, attention of a layer")


def _draw_quantised(axes: Any, record: Record) -> None:
    for model in dict.fromkeys(row["model"] for row in record["figures"]):
        rows = [row for row in record["figures"] if row["model"] == model]
        axes.plot([row["context"] for row in rows], [row["step ratio"] for row in rows], marker="o", label=model)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens per request", ylabel="decode step, int8 over float", ylim=(0, None))


def _draw_decode(axes: Any, record: Record) -> None:
    for batch in dict.fromkeys(row["batch"] for row in record["figures"]):
        rows = [row for row in record["figures"] if row["batch"] == batch]
        contexts = [row["context"] for row in rows]
        (line,) = axes.plot(contexts, [row["attention ratio"] for row in rows], marker="o", label=f"attention, {batch}")
        ratios = [row["step ratio"] for row in rows]
        axes.plot(contexts, ratios, marker="o", linestyle="--", color=line.get_color(), label=f"whole step, {batch}")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xscale="log", xlabel="tokens per request", ylabel="paged over virtual, time", ylim=(0, None))


def _draw_batching(axes: Any, record: Record) -> None:
    rows = sorted(record["figures"], key=lambda row: row["output tokens"])
    for scheduling in ("static", "continuous"):
        axes.plot([row[f"{scheduling} ms"] for row in rows], marker="o", linestyle="", label=scheduling)
    axes.set_xticks(range(len(rows)), [row["output tokens"] for row in rows], fontsize=7)
    axes.set(xlabel="requests, by their output tokens", ylabel="ms from arrival to end", ylim=(0, None))


def _draw_memory(axes: Any, record: Record) -> None:
    rows = record["figures"]
    for kv in ("static", "dynamic", "paged", "virtual"):
        axes.plot([row["requests"] for row in rows], [row[f"{kv} MiB"] for row in rows], marker="o", label=kv)
    axes.set(xscale="log", yscale="log", xlabel="requests at a time", ylabel="MiB at the peak")


def _draw_blocks(axes: Any, record: Record) -> None:
    rows = sorted(record["figures"], key=lambda row: row["tokens"])
    axes.bar(range(len(rows)), [row["blocks"] for row in rows], label="blocks used")
    axes.axhline(record["parameters"]["static reservation in blocks"], color="black", label="reserved by static")
    axes.set_xticks(range(len(rows)), [row["tokens"] for row in rows], fontsize=7)
    axes.set(xlabel="requests, by their tokens", ylabel="blocks", yscale="log")


def _draw_capacity(axes: Any, record: Record) -> None:
    rows = record["figures"]
    for shift, case in ((-0.2, "equal"), (0.2, "mixed")):
        places = [place + shift for place in range(len(rows))]
        axes.bar(places, [row[f"sequences, {case}"] for row in rows], width=0.4, label=f"{case} lengths")
    axes.set_xticks(range(len(rows)), [row["backend"] for row in rows])
    axes.set(ylabel=f"sequences in {record['parameters']['budget']}")


def _draw_backends(axes: Any, record: Record) -> None:
    styles = ("-", "--", ":")
    for context, style in zip(dict.fromkeys(row["context"] for row in record["figures"]), styles, strict=False):
        rows = [row for row in record["figures"] if row["context"] == context]
        for color, kv in enumerate(("static", "dynamic", "paged", "virtual")):
            speeds = [row[f"{kv} tokens/s"] for row in rows]
            label = f"{kv}, {context} tokens"
            axes.plot([row["batch"] for row in rows], speeds, f"C{color}{style}", marker="o", label=label)
    axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="tokens/s")


def _draw_block_size(axes: Any, record: Record) -> None:
    for marker, backend in (("o", "paged"), ("s", "virtual")):
        rows = [row for row in record["figures"] if row["backend"] == backend]
        waste, times = ([row[column] for row in rows] for column in ("mean unused rows", "over static"))
        axes.plot(waste, times, marker=marker, label=backend)
        for row, x, y in zip(rows, waste, times, strict=True):
            axes.annotate(row["block tokens"], (x, y), xytext=(3, 3), textcoords="offset points", fontsize=7)
    axes.set(xlabel="unused rows per request, mean (labels: tokens per block)", ylabel="attention over static's, time")
    axes.set(xscale="symlog", ylim=(0, None))


def _draw_profile(axes: Any, record: Record) -> None:
    rows = record["figures"]
    labels = [f"{row['kv']}, {row['steps'].split()[1]}" for row in rows]
    left = [0.0] * len(rows)
    for column in (name for name in rows[0] if name.endswith(" %")):
        widths = [row[column] * row["ms per step"] / 100 for row in rows]
        axes.barh(labels, widths, left=left, label=column.removesuffix(" %"))
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set(xlabel="ms per step")


def _draw_throughput(axes: Any, record: Record) -> None:
    sets = list(dict.fromkeys(row["set"] for row in record["figures"]))
    for offset, name in enumerate(sets):
        rows = [row for row in record["figures"] if row["set"] == name]
        places = [place + 0.4 * offset for place in range(len(rows))]
        axes.bar(places, [row["output tokens/s"] for row in rows], width=0.4, label=name)
        if offset == 0:
            axes.set_xticks(places, [row["engine"] for row in rows])
    axes.set(ylabel="output tokens per second")


def _draw_prefix(axes: Any, record: Record) -> None:
    rows = [row for row in record["figures"] if row["case"] == "shared prompt"]
    axes.bar([row["cache"] for row in rows], [row["TTFT s"] for row in rows], label="shared prompt")
    axes.set(ylabel="median time to first token, s")


def _draw_speculate(axes: Any, record: Record) -> None:
    for model, kv in dict.fromkeys((row["model"], row["kv"]) for row in record["figures"]):
        rows = [row for row in record["figures"] if (row["model"], row["kv"]) == (model, kv)]
        axes.plot(
            [row["tokens per step"] for row in rows],
            [row["speed-up"] for row in rows],
            marker="o",
            linestyle="",
            label=f"{model}, {kv}",
        )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set(xlabel="tokens per step of a request", ylabel="speed-up over plain decoding", ylim=(0, None))


def _draw_cache(axes: Any, record: Record) -> None:
    for dtype, style in (("float32", "-"), ("bfloat16", "--")):
        rows = [row for row in record["figures"] if row["dtype"] == dtype]
        for color, kind in enumerate(("static", "dynamic", "static x2", "virtual")):
            times = [row[f"{kind} ms"] for row in rows]
            axes.plot([row["context"] for row in rows], times, f"C{color}{style}", marker="o", label=f"{kind}, {dtype}")
    axes.set(xscale="log", xlabel="tokens", ylabel="ms per decode step", ylim=(0, None))


_DRAWINGS = {
    "step": _draw_step,
    "admission": _draw_admission,
    "overlap": _draw_overlap,
    "fragmentation": _draw_fragmentation,
    "windows": _draw_windows,
    "mla": _draw_mla,
    "quantised": _draw_quantised,
    "decode": _draw_decode,
    "batching": _draw_batching,
    "memory": _draw_memory,
    "blocks": _draw_blocks,
    "cache": _draw_cache,
    "capacity": _draw_capacity,
    "backends": _draw_backends,
    "block_size": _draw_block_size,
    "prefix": _draw_prefix,
    "profile": _draw_profile,
    "throughput": _draw_throughput,
    "speculate": _draw_speculate,
}


if __name__ == "__main__":
    raise SystemExit(main())
