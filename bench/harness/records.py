"""The committed records: bench/results/<machine>/<name>.json, and those of bench.gpu in <machine>/gpu/."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Records = dict[str, dict[str, Record]]


def load(results: Path, names: Iterable[str]) -> Records:
    """Records by benchmark and machine.

    Args:
        results: the folder with one folder per machine.
        names: the benchmarks that exist.

    Raises:
        ValueError: a record is of no benchmark, or of a run whose figures are void: a quick run, or one on a machine
            that was busy with something else.
    """
    records: Records = {name: {} for name in names}
    for path in sorted(results.glob("*/*.json")):
        record: Record = json.loads(path.read_text())
        for flaw in ("quick", "contended"):
            if record[flaw]:
                raise ValueError(f"{path} is from a {flaw} run and must not be published; run the benchmark again")
        if record["name"] not in records:
            raise ValueError(f"{path} is a record of {record['name']!r}, but bench/cases has no such benchmark")
        records[record["name"]][path.parent.name] = record
    return records


def load_gpu(results: Path, names: Sequence[str]) -> Records:
    """Records of `bench.gpu` by machine and part, in the order of `names`; of a part that failed, with the reason only.

    Raises:
        ValueError: a record is of no part, or its figures are void: of a quick run, of one over the stub driver, or of
            one on a machine that was busy with something else.
    """
    records: Records = {}
    for path in sorted(results.glob("*/gpu/*.json"), key=lambda path: _place(path, names)):
        record: Record = json.loads(path.read_text())
        for flaw in ("quick", "stub", "contended"):
            if record.get(flaw):
                raise ValueError(f"{path} is from a {flaw} run and must not be published; run the part again")
        records.setdefault(path.parts[-3], {})[path.stem] = record
    return records


def _place(path: Path, names: Sequence[str]) -> tuple[str, int]:
    if path.stem not in names:
        raise ValueError(f"{path} is a record of {path.stem!r}, but bench/gpu/parts has no such part")
    return path.parts[-3], names.index(path.stem)


# By family and model, which tell apart those that call themselves `AMD EPYC`.
_GENERATIONS = {
    (6, 85): "Cascade Lake",
    (6, 207): "Emerald Rapids",
    (25, 1): "Zen 3",
    (25, 17): "Zen 4",
    (26, 2): "Zen 5",
}


def machine(record: Record) -> str:
    """The CPU that a record was taken on, with its generation, or else its family and model."""
    hardware = record["hardware"]
    name = re.sub(r"\((R|TM)\)| Processor( @.*)?$", "", hardware["cpu"])
    if "cpu_family" in hardware:
        numbers = hardware["cpu_family"], hardware["cpu_model"]
        known = _GENERATIONS.get(numbers)
        name += f" ({known})" if known else f", family {numbers[0]} model {numbers[1]}"
    return f"{name}, {hardware['cores']} cores"


def setting(record: Record) -> str:
    """What a record was taken on, on one line: hardware and versions."""
    hardware, torch = record["hardware"], record["versions"]["torch"]
    gpu = ""
    if "gpu" in hardware:
        gpu = f"{hardware['gpu']}, {hardware['gpu_memory_bytes'] / 2**30:.0f} GiB, CUDA {hardware['cuda']}, beside "
    return f"{gpu}{machine(record)}, {hardware['memory_bytes'] / 2**30:.0f} GiB, {record['kernel']}, torch {torch}"


def commit(record: Record) -> str:
    """The commit that a record was taken at, shortened."""
    return (record["commit"] or "none")[:10] + (" with changes" if record["dirty"] else "")


def source(record: Record) -> str:
    """Where a record comes from, on one line: hardware, versions, commit and day."""
    return f"{setting(record)}, commit {commit(record)}, {record['date'][:10]}"
