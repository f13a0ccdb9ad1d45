"""How many threads compute: chosen by measuring steps, and measured again and again, since other programs come and go.

Threads meet after every product. One that has to wait for a core, because another program has it, makes all others
wait, so on a busy machine fewer threads can be several times as fast. And a small model has too little work for two.
Results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from vattn.cores import FreeCores, cores, thread_counts

logger = logging.getLogger(__name__)

Phase = Literal["decode", "prefill"]

# How long a number of threads is looked at, in steps and seconds, or in seconds alone: other programs take a core for a
# few milliseconds at a time, so a glance may see none of it.
_STEPS, _SECONDS, _LONG = 3, 0.012, 0.05
# Steps are compared whose sizes differ by at most this factor, and that are at most so many seconds old.
_ALIKE, _OLDEST = 1.25, 10.0
# Another number has to be better by this share, so that noise does not decide.
_MARGIN = 0.05
# Steps have lost a core if they take so many times as long as those before them, on so much less CPU time per second.
_SLOWER, _STARVED = 1.2, 0.85
# What trials cost may be this share of the time of steps. One of fewer threads waits until its cost is earned: it can
# double the time to a prompt's first token. After each that finds nothing better, the pause doubles.
_TRIAL_SHARE = 0.02
_PAUSE, _LONGEST_PAUSE = 0.5, 8.0
# How often to look for free cores.
_LOOK = 0.1
# Tokens of the steps that are measured when a model is loaded, and how long that may take.
_LOADING_TOKENS: dict[Phase, int] = {"decode": 8, "prefill": 64}
_LOADING_SECONDS = 0.5
_OMP_PAUSE_SOFT = 1


def _enough(steps: int, seconds: float) -> bool:
    """Whether steps say what other steps of their size will take."""
    return seconds >= _LONG or (steps >= _STEPS and seconds >= _SECONDS)


class _Steps:
    """What the last steps of one size took, all with the same number of threads: seconds, and CPU seconds."""

    def __init__(self) -> None:
        self._taken: deque[tuple[float, float]] = deque()
        self._seconds = 0.0
        self.last = 0.0  # when the last one ended

    @property
    def known(self) -> bool:
        return _enough(len(self._taken), self._seconds)

    @property
    def mean(self) -> float:
        return self._seconds / len(self._taken)

    def add(self, seconds: float, cpu_seconds: float, now: float) -> None:
        if now - self.last > _OLDEST:
            self._forget(len(self._taken))
        self.last = now
        self._taken.append((seconds, cpu_seconds))
        self._seconds += seconds
        while len(self._taken) > 2 * _STEPS and self._seconds - self._taken[0][0] > 2 * _LONG:
            self._forget(1)

    def starved(self) -> float:
        """How many times as long the last of them took as those before, which are then forgotten; 0 unless they got
        less of the CPU, too.
        """
        recent, seconds, cpu_seconds = 0, 0.0, 0.0
        for taken in reversed(self._taken):
            recent, seconds, cpu_seconds = recent + 1, seconds + taken[0], cpu_seconds + taken[1]
            if recent > 1 and seconds >= _SECONDS / 2:
                break
        before, seconds_before = len(self._taken) - recent, self._seconds - seconds
        if not _enough(before, seconds_before):
            return 0.0
        slower = (seconds / recent) / (seconds_before / before)
        cpu_before = sum(taken[1] for taken in self._taken) - cpu_seconds
        if slower < _SLOWER or cpu_seconds / seconds > _STARVED * cpu_before / seconds_before:
            return 0.0
        self._forget(before)
        return slower

    def _forget(self, count: int) -> None:
        for _ in range(count):
            self._seconds -= self._taken.popleft()[0]


@dataclass
class _Trial:
    """Steps with another number of threads, and what they would have taken with the present one."""

    count: int
    steps: int = 0
    seconds: float = 0.0
    usual: float = 0.0


class Tuner:
    """Chooses among numbers of threads for one kind of step, by what the steps take.

    The present number is compared with its neighbours: every now and then, and as soon as steps take longer than those
    before them.

    Args:
        counts: in ascending order.
        clock: seconds.
        free: how many cores were free since it was last called; `FreeCores` by default. More threads are only tried if
            there were as many.

    Attributes:
        count: the present choice.
        slowdown: how many times as long steps took when cores were lost last.
    """

    def __init__(
        self,
        counts: Sequence[int],
        clock: Callable[[], float] = time.perf_counter,
        free: Callable[[], int] | None = None,
    ) -> None:
        self._counts = tuple(counts)
        self._clock = clock
        self._free = free or FreeCores()
        self._steps: dict[int, _Steps] = {}  # with the present number, by size
        self._size = 0  # of the step under way
        self._trial: _Trial | None = None
        self._trying = False  # whether the step under way is part of it
        self._up = False  # whether the next trial is one of more threads
        self._starved = False  # whether a core was lost since the last trial
        self._pause = _PAUSE
        self._due = 0.0
        self._factors: dict[int, float] = {}  # seconds with another number over those with the present one, if known
        self._credit = 0.0  # seconds that the next trial may cost
        self._given_up = 0  # the number before it followed another kind
        self.slowdown = 1.0
        self.count = self._counts[-1]

    def follow(self, other: Tuner) -> None:
        """Takes over what steps of another kind have just found: that cores were lost, or that more are there.

        Decodes wait for memory, so that a moment's noise makes fewer threads the faster ones: prompts, which do not,
        give cores up only for a loss that costs more than computing with fewer threads does.
        """
        if other.count < self.count:
            if other.slowdown > self._factors.get(other.count, self.count / other.count):
                given_up = max(self.count, self._given_up)
                self.choose(other.count)
                self._given_up = given_up
        elif self.count < self._given_up <= other.count:
            self.choose(self._given_up)
        elif other.count > self.count:
            self._changed(up=True)

    def choose(self, count: int, seconds: Mapping[int, float] | None = None) -> None:
        """Starts anew from this number.

        Args:
            seconds: what a step takes, by number of threads.
        """
        self.count, self._trial, self._pause, self._given_up = count, None, _PAUSE, 0
        self._factors = {other: taken / seconds[count] for other, taken in seconds.items()} if seconds else {}
        self._credit = 0.0
        self._steps.clear()
        self._due = self._clock() + _PAUSE
        self._free()

    def next(self, tokens: int) -> int:
        """The number of threads for a step of so many tokens."""
        if len(self._counts) == 1:
            return self.count
        self._size = round(math.log(tokens, _ALIKE))
        steps, now = self._steps.get(self._size), self._clock()
        self._trying = steps is not None and steps.known and now - steps.last < _OLDEST and now >= self._due
        if not self._trying:
            return self.count
        if self._trial is None:
            assert steps is not None
            other = self._neighbour()
            if other > self.count:
                promising = self._credit >= 0 and self._free() >= other
            else:
                promising = self._credit >= (self._factors.get(other, 1.0) - 1) * max(steps.mean, _LONG)
            if not promising:
                self._trying, self._due = False, now + _LOOK
                return self.count
            self._trial = _Trial(other)
        return self._trial.count

    def took(self, seconds: float, cpu_seconds: float) -> bool:
        """What the step took for which `next` was called last.

        Args:
            cpu_seconds: of all threads.

        Returns:
            Whether the choice changed because cores were lost, or are there again.
        """
        if len(self._counts) == 1:
            return False
        now, trial = self._clock(), self._trial
        if trial is not None and self._trying:
            trial.steps += 1
            trial.seconds += seconds
            trial.usual += self._steps[self._size].mean
            return self._judge(trial, now)
        steps = self._steps.setdefault(self._size, _Steps())
        steps.add(seconds, cpu_seconds, now)
        self._credit += _TRIAL_SHARE * seconds
        if self.count > self._counts[0] and (slowdown := steps.starved()):
            self._steps = {self._size: steps}
            self._starved, self.slowdown = True, slowdown
            self._changed(up=False)
        return False

    def _changed(self, *, up: bool) -> None:
        """The machine is another one than that of the last trials: the next one is due."""
        self._up, self._trial, self._pause, self._due = up, None, _PAUSE, self._clock()
        self._factors.clear()
        self._credit = 0.0

    def _neighbour(self) -> int:
        at = self._counts.index(self.count)
        if at == 0 or at + 1 == len(self._counts):
            self._up = at == 0
        return self._counts[at + 1 if self._up else at - 1]

    def _judge(self, trial: _Trial, now: float) -> bool:
        """Ends the trial, once its result is clear; returns as `took`."""
        if not _enough(trial.steps, trial.seconds):
            return False
        self._trial = None
        better = trial.seconds < (1 - _MARGIN) * trial.usual
        others = better and (trial.count > self.count or self._starved)
        if better:
            logger.debug("%d computing threads instead of %d", trial.count, self.count)
            self.choose(trial.count, {self.count: trial.usual, trial.count: trial.seconds})
        else:
            self._up = not self._up
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            self._due = now + self._pause
            self._factors[trial.count] = trial.seconds / trial.usual
            self._credit = min(0.0, self._credit - (trial.seconds - trial.usual))
        self._starved = False
        return others


class Threads:
    """The number of threads of an engine's steps.

    Args:
        num_threads: a number, or "auto": measured, from one to torch's number when this is made.
        on_cpu: whether the model computes there; if not, torch's number is left alone.
    """

    def __init__(self, num_threads: int | Literal["auto"], *, on_cpu: bool) -> None:
        counts: Sequence[int] = ()
        if on_cpu:
            auto = num_threads == "auto"
            counts = thread_counts(cores(), torch.get_num_threads()) if auto else (int(num_threads),)
        self._tuners: dict[Phase, Tuner] = {phase: Tuner(counts) for phase in _LOADING_TOKENS} if counts else {}
        self._counts = counts

    @property
    def counts(self) -> dict[Phase, int]:
        """The present numbers; none if torch's number is left alone."""
        return {phase: tuner.count for phase, tuner in self._tuners.items()}

    def measure(self, step: Callable[[int], object], most_tokens: dict[Phase, int]) -> None:
        """Makes a first choice by running a few steps, and logs it.

        Args:
            step: runs a step of so many tokens.
            most_tokens: of a step, by phase.
        """
        if len(self._counts) <= 1:
            return
        told = []
        for phase, tuner in self._tuners.items():
            try:
                seconds = self._compare(step, min(_LOADING_TOKENS[phase], most_tokens[phase]))
            except Exception:  # of the model; steps of requests report it to those who asked
                logger.warning("no steps could be measured to choose a number of threads", exc_info=True)
                return
            tuner.choose(min(seconds, key=seconds.__getitem__), seconds)
            times = ", ".join(f"{count}: {1e3 * taken:.2f} ms" for count, taken in seconds.items())
            told.append(f"{tuner.count} for {phase} steps ({times})")
        logger.info("computing threads: %s; measured again as the engine runs", ", ".join(told))

    def _compare(self, step: Callable[[int], object], tokens: int) -> dict[int, float]:
        """Seconds of a step by number of threads, from one up, until more of them are slower.

        A large model is not measured: its steps keep all threads busy, and take long.
        """
        seconds: dict[int, float] = {}
        for count in self._counts:
            with _computing(count):
                start = time.perf_counter()
                step(tokens)  # makes threads, and lays out what the first call lays out
                now = time.perf_counter()
                if not seconds and now - start > _LOADING_SECONDS:
                    return {self._counts[-1]: now - start}
                start, steps = now, 0
                while not _enough(steps, now - start):
                    step(tokens)
                    now, steps = time.perf_counter(), steps + 1
            taken = (now - start) / steps
            slower = bool(seconds) and taken > min(seconds.values())
            seconds[count] = taken
            if slower:
                break
        return seconds

    @contextmanager
    def computing(self, phase: Phase, tokens: int) -> Iterator[AbstractContextManager[None]]:
        """Within it, a step of so many tokens is computed by the chosen number of threads.

        What it yields is entered for the part that is measured, which should depend on the number of tokens only. The
        rest of the step belongs within it, too: GNU's OpenMP ends the threads that a computation with fewer of them
        leaves out, and makes new ones for the next with more.
        """
        tuner = self._tuners.get(phase)
        if tuner is None:
            yield nullcontext()
            return
        with _computing(tuner.next(tokens)):
            yield self._measuring(tuner)

    @contextmanager
    def _measuring(self, tuner: Tuner) -> Iterator[None]:
        start, cpu_start = time.perf_counter(), time.process_time()
        yield
        if tuner.took(time.perf_counter() - start, time.process_time() - cpu_start):
            for other in self._tuners.values():
                other.follow(tuner)


@contextmanager
def _computing(count: int) -> Iterator[None]:
    """Lets torch, and vattn's kernels with it, compute with so many threads."""
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def end_team() -> None:
    """Ends the threads that have computed for the calling one; its next computation makes new ones.

    An OpenMP runtime keeps them for the thread that called it. GNU's, once it has more of them than there are cores,
    lets those that wait for each other sleep at once, and waking one up takes tens of microseconds: a token of a server
    with one client took 1.1 to 1.2 times as long.
    """
    pause = getattr(ctypes.CDLL(None), "omp_pause_resource_all", None)  # OpenMP 5.0
    if pause is not None:
        pause(_OMP_PAUSE_SOFT)
