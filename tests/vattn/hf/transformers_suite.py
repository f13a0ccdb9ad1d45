"""transformers' own tests of generation, with a VirtualCache in a DynamicCache's place.

    git clone --depth 1 --branch v$(python -c "import transformers; print(transformers.__version__)") \\
        https://github.com/huggingface/transformers /tmp/transformers
    pip install parameterized
    python tests/vattn/hf/transformers_suite.py --tests /tmp/transformers/tests llama gemma2 mistral gpt2 qwen2

Runs the tests of these model families (of all, without a name) that have to do with generation or caches, twice: as
they are, and with a VirtualCache wherever transformers makes a DynamicCache for a model that it serves. What fails only
the second time is printed, by reason; the exit status says whether a reason is new. A checkout of the installed version
is needed: the source distribution on PyPI does not have the models' tests.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

# Which of a family's tests: those of the generation mixin, and others that go through a cache.
SELECTION = "generate or generation or cache or beam or sample or greedy or assisted or past_key or padding"

# What a VirtualCache does not do, by what its failures say. Documented in docs/how-to/transformers.md.
KNOWN = {
    "keeps no gradients of tokens": "gradients through earlier forward passes",
    "is for layers of full or sliding-window attention": "a model that is refused",
    "stays on the model's device": "offloading",
    "An assignment replaces values": "keys of another shape assigned to a layer",
}
_ENVIRONMENT = "VATTN_TRANSFORMERS_SUITE"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=Path, required=True, help="the tests folder of a checkout of transformers")
    parser.add_argument("--select", default=SELECTION, help="pytest's -k; by default what has to do with generation")
    parser.add_argument("--json", type=Path, help="where every test's outcome is written")
    parser.add_argument("families", nargs="*", help="folders of tests/models; all of them without a name")
    arguments = parser.parse_args()
    models: Path = arguments.tests / "models"
    if not models.is_dir():
        parser.error(f"{models} is not there: --tests takes the tests folder of a checkout of transformers")
    families = arguments.families or sorted(path.name for path in models.iterdir() if path.is_dir())
    files = [file for family in families for file in sorted((models / family).glob("test_modeling_*.py"))]
    missing = [family for family in arguments.families if not list((models / family).glob("test_modeling_*.py"))]
    if missing:
        parser.error(f"no tests of {', '.join(missing)} in {models}")
    plain = _run(arguments.tests, files, arguments.select, virtual=False)
    virtual = _run(arguments.tests, files, arguments.select, virtual=True)
    if arguments.json:
        arguments.json.write_text(json.dumps({"dynamic": plain, "virtual": virtual}, indent=1))
    return _report(plain, virtual)


def _run(tests: Path, files: list[Path], select: str, *, virtual: bool) -> dict[str, Any]:
    """Outcomes by test, and how many caches were made, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--no-header", "-o", "addopts="]
        command += ["-p", "transformers_suite", "-p", "no:cacheprovider", "-k", select]
        path = [str(Path(__file__).parent), str(tests.parent), os.environ.get("PYTHONPATH", "")]
        changed = {
            "PYTHONPATH": os.pathsep.join(path),
            "HF_HUB_OFFLINE": os.environ.get("HF_HUB_OFFLINE", "1"),
            _ENVIRONMENT: json.dumps({"results": str(results), "virtual": virtual}),
        }
        subprocess.run([*command, *map(str, files)], cwd=tests.parent, env=os.environ | changed, check=False)
        if not results.exists():
            sys.exit("pytest ended without results; its output is above")
        found: dict[str, Any] = json.loads(results.read_text())
        return found


def _report(plain: dict[str, Any], virtual: dict[str, Any]) -> int:
    """Prints what differs; 1 where a failure has no known reason, or nothing was tested."""
    before, after = plain["outcomes"], virtual["outcomes"]
    counts = Counter(outcome["outcome"] for outcome in after.values())
    print(f"\n{', '.join(f'{count} {name}' for name, count in sorted(counts.items()))} with a VirtualCache")
    print(f"{virtual['virtual']} VirtualCaches were made, {virtual['dynamic']} DynamicCaches for models it refuses")
    failed = [{test for test, found in run.items() if found["outcome"] == "failed"} for run in (before, after)]
    worse = sorted(failed[1] - failed[0])
    reasons: dict[str, list[str]] = {}
    for test in worse:
        why = after[test]["why"]
        reason = next((known for text, known in KNOWN.items() if text in why), None)
        reasons.setdefault(reason or f"NEW: {why[-300:]}", []).append(test)
    print(f"{len(worse)} fail that pass with a DynamicCache" + (":" if worse else ""))
    for reason, tests in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(tests)} x {reason}")
        for test in tests[:10]:
            print(f"    {test}")
    if not virtual["virtual"]:
        print("no test made a VirtualCache")
    return int(not virtual["virtual"] or any(reason.startswith("NEW") for reason in reasons))


# As a plugin of pytest, in the process that runs the tests


class Recorder:
    """Outcomes of the tests, and counts of the caches that they made."""

    def __init__(self, results: Path, *, virtual: bool) -> None:
        self.results = results
        self.outcomes: dict[str, dict[str, str]] = {}
        self.made = {"virtual": 0, "dynamic": 0}
        if virtual:
            self.replace()

    def replace(self) -> None:
        """Puts a class in DynamicCache's place that makes VirtualCaches; before models import it."""
        import transformers
        from transformers import cache_utils

        from vattn import UnsupportedModel
        from vattn.hf import VirtualCache  # before the change: it asks a DynamicCache what layers a model has

        dynamic, made = cache_utils.DynamicCache, self.made

        class Meta(type):
            def __call__(cls, ddp_cache_data: Any = None, config: Any = None, **options: Any) -> Any:
                if ddp_cache_data is None and config is not None and not options.get("offloading"):
                    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
                    try:
                        cache = VirtualCache(config, max_context_len=max(longest or 0, 4096))
                        made["virtual"] += 1
                        return cache
                    except UnsupportedModel:
                        made["dynamic"] += 1
                return dynamic(ddp_cache_data, config=config, **options)

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, dynamic | VirtualCache)

            def __getattr__(cls, name: str) -> Any:
                return getattr(dynamic, name)

        class DynamicCache(metaclass=Meta):
            pass

        cache_utils.DynamicCache = DynamicCache  # type: ignore[assignment, misc]
        transformers.DynamicCache = DynamicCache  # type: ignore[assignment, misc]
        for name, module in list(sys.modules.items()):
            if name.startswith("transformers.") and vars(module).get("DynamicCache") is dynamic:
                module.DynamicCache = DynamicCache  # type: ignore[attr-defined]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            why = report.longreprtext if report.outcome == "failed" else ""
            self.outcomes[report.nodeid] = {"outcome": report.outcome, "why": why[-2000:]}

    def pytest_sessionfinish(self) -> None:
        self.results.write_text(json.dumps({"outcomes": self.outcomes, **self.made}))


def pytest_configure(config: Any) -> None:
    if settings := os.environ.get(_ENVIRONMENT):
        given = json.loads(settings)
        config.pluginmanager.register(Recorder(Path(given["results"]), virtual=given["virtual"]))


if __name__ == "__main__":
    sys.exit(main())
