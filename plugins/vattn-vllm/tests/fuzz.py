"""Random engines and requests, with the plugin and without it: the same tokens, step by step.

    python tests/fuzz.py --minutes 10 --seed 1
    python tests/fuzz.py --world 1000003    # one of them again

A world is an engine's options and what is asked of it: prompts that share prefixes, of one token and more, in waves,
with several samples, stop tokens, aborts at any step, and resets of the prefix cache. It is played twice, each time in
a process of its own. After each step of the plugin's engine, the blocks with memory are those that its scheduler
believes, and every mapping is where the books say; when nothing is left to do, no more is backed than the options keep.

A different token is a tie where vLLM itself has the two within rounding of each other; a few among many are expected,
and are counted. Engines that gave up cached blocks, or borrow memory, schedule otherwise than vLLM, so only what
requests got in the end is the same.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from environment import environment

from vattn.broker.places import FOLDER_VARIABLE
from vattn.broker.server import Broker

if __name__ == "__main__":
    os.environ |= environment()

import models

MAX_LENGTH = 400
# Of log probabilities: what kernels may differ by, and below what two tokens are a tie.
ROUNDING = 1e-3
# A world takes seconds; one that takes so much longer hangs.
SECONDS = 300


@dataclass
class World:
    """An engine, and what is asked of it.

    Attributes:
        llm: options of both engines.
        plugin: options of the plugin.
        budget: blocks of the pool that a broker lends, or None.
        script: for each step, what is done before it.
    """

    kind: str
    llm: dict[str, Any]
    plugin: dict[str, Any]
    budget: int | None
    script: list[list[dict[str, Any]]]

    @property
    def same_steps(self) -> bool:
        """Whether the plugin's engine schedules as vLLM does."""
        return self.budget is None and (not self.llm["enable_prefix_caching"] or self.plugin["keep_cached"] == 1)


def draw(seed: int) -> World:
    """The world of a seed."""
    rng = random.Random(seed)
    kind = rng.choice(list(models.KINDS))
    block = rng.choice([32, 32, 64, 128])
    chunk = rng.choice([16, 32, 33, 64, 100, 256])
    # The last group of a hybrid model may need as many blocks as all others together.
    least = 4 * (-(-MAX_LENGTH // block) + 1)
    llm: dict[str, Any] = {
        "dtype": "float32",
        "max_model_len": MAX_LENGTH,
        "max_num_batched_tokens": chunk,
        "max_num_seqs": rng.randint(2, min(chunk, 10)),
        "block_size": block,
        "num_gpu_blocks_override": least + rng.choice([0, 1, 5, 20, 200]),
        "enable_prefix_caching": rng.random() < 0.6,
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "seed": 0,
        "disable_hybrid_kv_cache_manager": rng.random() < 0.2,
    }
    if rng.random() < 0.2:
        llm["long_prefill_token_threshold"] = rng.choice([1, 7, chunk])
    if rng.random() < 0.2:
        llm["scheduling_policy"] = "priority"
    drafts = rng.random() < 0.15
    if drafts:
        llm["speculative_config"] = {
            "method": "ngram",
            "num_speculative_tokens": rng.randint(1, 4),
            "prompt_lookup_max": 3,
            "prompt_lookup_min": 1,
        }
    plugin: dict[str, Any] = {
        "guard": rng.choice(["zero", "strict", "strict"]),
        "layout": rng.choice(["auto", "layered", "fused"]),
        "page_size": rng.choice(["auto", "auto", 4096]),
        "spare_windows": rng.choice([0, 1, 8]),
        "keep_cached": rng.choice([0, 0.3, 1]),
        "keep_free": rng.choice([0, 0.05, 0.5]),
        "kernel": rng.choice(["auto", "auto", "torch_sdpa"]),
    }
    budget = least + rng.choice([2, 10]) if rng.random() < 0.2 else None
    # With drafts, vLLM's sampler fails in steps without any if a request has top_k.
    script = _script(rng, block, chunk, [1] if drafts else [1, 1, 1, 2, 3])
    return World(kind, llm, plugin, budget, script)


def _script(rng: random.Random, block: int, chunk: int, samples: list[int]) -> list[list[dict[str, Any]]]:
    edges = [1, 1, 2, 3, block - 1, block, block + 1, chunk - 1, chunk, chunk + 1, 2 * chunk + 1, 63, 300]
    most = MAX_LENGTH - 40
    prefixes = [_tokens(rng, most) for _ in range(3)]
    script: list[list[dict[str, Any]]] = []
    names: list[str] = []
    for _ in range(rng.randint(2, 5)):  # waves, with rest between them
        for _ in range(rng.randint(1, 40)):
            now: list[dict[str, Any]] = []
            while rng.random() < 0.35:
                length = max(1, min(most, rng.choice([*edges, rng.randint(1, most)])))
                shared = rng.choice([0, 0, length // 2, length - 1, length])
                prompt = rng.choice(prefixes)[:shared] + _tokens(rng, length - shared)
                names.append(str(len(names)))
                now.append(
                    {
                        "do": "add",
                        "name": names[-1],
                        "prompt": prompt,
                        "max_tokens": rng.choice([1, 2, rng.randint(1, 39)]),
                        "n": rng.choice(samples),
                        "stop_token_ids": _tokens(rng, 30) if rng.random() < 0.3 else [],
                        "prompt_logprobs": rng.random() < 0.1,
                        "priority": rng.randint(0, 3),
                    }
                )
            if names and rng.random() < 0.06:
                now.append({"do": "abort", "name": rng.choice(names[-8:])})
            if rng.random() < 0.01:
                now.append({"do": "reset", "running": rng.random() < 0.5})
            script.append(now)
        script.append([{"do": "finish"}])
    return script


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(5, 1000) for _ in range(count)]


@dataclass
class Played:
    """What an engine did.

    Attributes:
        block_bytes: of a block.
        steps: what each step answered: `[name, choice, tokens, finish reason]`, with everything so far.
        scores: for each name and choice, of every token its log probability and that of the best other one.
        prompts: for each name, the prompt's log probabilities and how many of its tokens were cached.
        counts: what happened.
    """

    block_bytes: int = 0
    steps: list[list[list[Any]]] = field(default_factory=list)
    scores: dict[str, list[list[float]]] = field(default_factory=dict)
    prompts: dict[str, list[Any]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


def play(world: World, model: Path, block_bytes: int | None) -> Played:
    """Plays a world in this process.

    Args:
        block_bytes: of a block, for the plugin; None to play it without.
    """
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    more: dict[str, Any] = {}
    plugin = block_bytes is not None
    if plugin:
        options = dict(world.plugin)
        if world.budget is not None:
            options["kv_pool"] = _lend(world.budget * block_bytes, model.parent)
        more = {"worker_cls": "vattn_vllm.CPUWorker", "additional_config": {"vattn": options}}
    engine = LLM(str(model), **world.llm, **more).llm_engine
    core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
    counts: Counter[str] = Counter()
    cache = core.scheduler.kv_cache_config
    played = Played(block_bytes=cache.kv_cache_tensors[0].size // cache.num_blocks)
    preempt = core.scheduler._preempt_request

    def preempting(*args: Any, **keywords: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **keywords)

    core.scheduler._preempt_request = preempting

    def step() -> None:
        before = core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        answer = []
        for output in engine.step():
            for choice in output.outputs:
                answer.append([output.request_id, choice.index, list(choice.token_ids), choice.finish_reason])
                scores = []
                for token, found in zip(choice.token_ids, choice.logprobs, strict=True):
                    others = [each.logprob for other, each in found.items() if other != token]
                    scores.append([found[token].logprob, max(others)])
                played.scores[f"{output.request_id}/{choice.index}"] = scores
            prompt = [next(iter(found.values())).logprob for found in output.prompt_logprobs or () if found]
            played.prompts[output.request_id] = [output.num_cached_tokens, prompt]
        played.steps.append(sorted(answer, key=lambda each: each[:2]))
        counts["steps"] += 1
        counts["blocks moved"] += abs(before - core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        if plugin:
            check()

    def check() -> None:
        worker = core.model_executor.driver_worker.worker
        worker.vattn_check()
        backed, believed = worker._memory.windows.backed(), core.scheduler._vattn._backed
        assert backed - {0} == believed, f"{backed} have memory, and the scheduler believes {believed}"
        pool = core.scheduler.kv_cache_manager.block_pool
        used = {block.block_id for block in pool.blocks if block.ref_cnt} - {0}
        assert used <= believed, f"a request has blocks {used - believed} without memory"
        assert world.budget is None or len(backed) <= world.budget, f"{len(backed)} of {world.budget} blocks"

    def finish() -> None:
        while engine.has_unfinished_requests():
            step()
        step()  # which tells the worker that the last ones have ended
        if plugin:
            pool = core.scheduler.kv_cache_manager.block_pool
            kept = sum(int(world.plugin[name] * pool.num_gpu_blocks) for name in ("keep_cached", "keep_free"))
            stats = core.model_executor.driver_worker.worker.vattn_stats()
            assert stats["backed_blocks"] <= kept + (kept > 0), f"{stats} when idle, and {kept} blocks may stay"
            assert kept or stats["mapped_bytes"] == 0, f"{stats} when idle"

    for events in world.script:
        for event in events:
            counts[event["do"]] += 1
            if event["do"] == "add":
                params = SamplingParams(
                    # Of one token, since engines draw their random numbers in another order.
                    temperature=0 if event["n"] == 1 else 1,
                    top_k=0 if event["n"] == 1 else 1,
                    n=event["n"],
                    max_tokens=event["max_tokens"],
                    stop_token_ids=event["stop_token_ids"],
                    ignore_eos=True,
                    detokenize=False,
                    logprobs=2,
                    prompt_logprobs=0 if event["prompt_logprobs"] else None,
                    output_kind=RequestOutputKind.CUMULATIVE,
                )
                counts["samples"] += event["n"]
                counts["prompt tokens"] += len(event["prompt"])
                counts["one-token prompts"] += len(event["prompt"]) == 1
                prompt = TokensPrompt(prompt_token_ids=event["prompt"])
                priority = event["priority"] if world.llm.get("scheduling_policy") == "priority" else 0
                engine.add_request(event["name"], prompt, params, priority=priority)
            elif event["do"] == "abort":
                engine.abort_request([event["name"]])
            elif event["do"] == "reset":
                engine.reset_prefix_cache(reset_running_requests=event["running"])
            else:
                finish()
        if events != [{"do": "finish"}] and engine.has_unfinished_requests():
            step()
    counts["output tokens"] = sum(map(len, played.scores.values()))
    counts["cached tokens"] = sum(cached or 0 for cached, _ in played.prompts.values())
    if plugin:
        stats = core.model_executor.driver_worker.worker.vattn_stats()
        counts["blocks shown"], counts["blocks hidden"] = stats["attached_blocks"], stats["detached_blocks"]
    played.counts = dict(counts)
    return played


def _lend(budget: int, folder: Path) -> str:
    """The name of a pool, of which a thread of this process is the broker, as long as it lives."""
    os.environ[FOLDER_VARIABLE] = tempfile.mkdtemp(dir=folder)
    threading.Thread(target=Broker("fuzz", budget).run, daemon=True).start()
    return "fuzz"


class Different(Exception):
    """The plugin's engine did something else than vLLM's."""


def compare(world: World, stock: Played, ours: Played) -> int:
    """The choices with a tie.

    Raises:
        Different: the engines differ in anything else.
    """
    expected, found = _choices(stock), _choices(ours)
    # An aborted request may have got further with one engine than with the other.
    aborted = {event["name"] for events in world.script for event in events if event["do"] == "abort"}
    tied = 0
    for key in expected.keys() | found.keys():
        (tokens, reason), (others, why) = expected.get(key, ([], None)), found.get(key, ([], None))
        place = next((i for i, pair in enumerate(zip(tokens, others, strict=False)) if pair[0] != pair[1]), None)
        if place is not None and _tie(*stock.scores[key][place]):
            tied += 1
        elif place is not None or (key.split("/")[0] not in aborted and (tokens, reason) != (others, why)):
            raise Different(
                f"{key} got {others} {why}, and {tokens} {reason} without the plugin; they part at {place}, where the "
                f"scores are {place is not None and stock.scores[key][place]}"
            )
        for a, b in zip(stock.scores.get(key, [])[:place], ours.scores.get(key, [])[:place], strict=False):
            if not _tie(a[0], b[0]):
                raise Different(f"a log probability of {key} is {b[0]}, and {a[0]} without the plugin")
    for name in stock.prompts.keys() & ours.prompts.keys():
        if not all(map(_tie, stock.prompts[name][1], ours.prompts[name][1])):
            raise Different(f"the prompt of {name} has other log probabilities")
    if world.same_steps and not tied:
        for name, (cached, _) in stock.prompts.items():
            if (also := ours.prompts[name][0]) != cached:
                raise Different(f"{name} found {also} tokens in the cache, and {cached} without the plugin")
        for number, (step, other) in enumerate(zip_longest(stock.steps, ours.steps)):
            if step != other:
                raise Different(f"step {number} of {len(ours.steps)} answers {other}, and {step} without the plugin")
    return tied


def _choices(played: Played) -> dict[str, tuple[list[int], str | None]]:
    """What each choice got in the end."""
    return {f"{name}/{choice}": (tokens, reason) for step in played.steps for name, choice, tokens, reason in step}


def _tie(a: float, b: float) -> bool:
    return abs(a - b) < ROUNDING


def in_child(world: World, model: Path, block_bytes: int | None = None) -> Played:
    """Plays a world in a process of its own, which may die.

    Raises:
        Different: it failed.
    """
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as log:
        pid = os.fork()
        if not pid:
            status = 1
            try:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                answer.write(json.dumps(vars(play(world, model, block_bytes))))
                answer.flush()
                status = 0
            except BaseException:
                traceback.print_exc(file=log)
                log.flush()
            finally:
                os._exit(status)
        end = time.monotonic() + SECONDS
        while not (done := os.waitpid(pid, os.WNOHANG))[0]:
            if time.monotonic() > end:
                os.kill(pid, 9)
            time.sleep(0.02)
        log.seek(0)
        if done[1]:
            which = "vLLM's engine without the plugin" if block_bytes is None else "the plugin's engine"
            raise Different(f"{which} ended with status {done[1]}:\n{log.read()[-4000:]}")
        answer.seek(0)
        return Played(**json.load(answer))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--worlds", type=int, help="so many, however long they take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", type=int, help="the world of this seed alone")
    args = parser.parse_args()
    # In the parent, so that a world does not take the seconds of an import.
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401

    total: Counter[str] = Counter()
    failed = 0
    end = time.monotonic() + 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        made: dict[str, Path] = {}
        seeds = [args.world] if args.world is not None else range(args.seed * 1_000_000, (args.seed + 1) * 1_000_000)
        for count, seed in enumerate(seeds):
            if time.monotonic() > end if args.worlds is None else count >= args.worlds:
                break
            world = draw(seed)
            if world.kind not in made:
                made[world.kind] = models.make(world.kind, Path(folder, str(len(made))))
            total["worlds"] += 1
            total[f"worlds: {world.kind}"] += 1
            total["worlds that borrow"] += world.budget is not None
            try:
                stock = in_child(world, made[world.kind])
                ours = in_child(world, made[world.kind], stock.block_bytes)
                total["ties"] += compare(world, stock, ours)
                total.update(ours.counts)
            except Different as different:
                failed += 1
                print(
                    f"WORLD {seed} ({world.kind}; {world.llm}; {world.plugin}; {world.budget}): {different}", flush=True
                )
    for name in sorted(total):
        print(f"{total[name]:>10} {name}")
    print(f"{failed} of {total['worlds']} worlds differ")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
