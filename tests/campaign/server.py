"""The server under clients of every kind, beside some that behave; none may take much memory, or wait for another.

    python -m tests.campaign.server --minutes 10 --seed 1 --health 0.1

The server is a process of its own, as `vattn serve` starts it, with the shipped model. In a round one request is sent
alone, and its memory measured; then dozens at once, while a few well-behaved streams get the answers that they get
alone, and `/health` is asked fifty times a second. In the end nothing may be left: no request, page or descriptor, and
no work.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from tests.campaign.attacks import SECRET, Attack, draw
from tests.campaign.isolation import alive, stacks_of
from tests.campaign.play import Played
from tests.support.forks import die_with_parent

MOST_BYTES = 64 * 2**20  # that a request takes
MOST_KEPT_BYTES = 96 * 2**20  # of caches, and of Python's arenas
MOST_STORM_BYTES = 256 * 2**20  # that dozens take together
MOST_CPU_SECONDS = 2.5  # after the last client has its answer or has left
MOST_MESSAGE_BYTES = 1200
PATIENCE = 300.0  # seconds in which everything has an answer on a busy machine
START_SECONDS = 120.0
ROUNDS = 12  # of a server
WELL_BEHAVED = (
    "Question: What is 17 + 25?\nAnswer:",
    "Question: Count to 20.\nAnswer:",
    SECRET,
)
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vattn:pages_owned")
PARTS = ("owned", "parked", "cached", "other", "free")
PERIOD = 0.02

most_health_seconds: float | None = None


class Found(Exception):
    """Something that must not be.

    Attributes:
        kind: without numbers.
    """

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind = kind


@dataclass
class Answer:
    """What a client got: status 0 where the connection was closed without an answer."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    times: list[float] = field(default_factory=list)


@dataclass
class Worst:
    """The worst that was seen of a server, in seconds and bytes."""

    health: float = 0.0
    health_running: float = 0.0  # without the time in which a thread of the server waited for a core
    first_token: float = 0.0
    between_tokens: float = 0.0
    memory: int = 0
    memory_of: str = ""
    storm: int = 0
    left: float = 0.0  # computed after the last client had its answer or had left

    def __str__(self) -> str:
        return (
            f"/health {1000 * self.health:.0f} ms, {1000 * self.health_running:.0f} ms without waits for a core; first "
            f"token {self.first_token:.2f} s, between two {self.between_tokens:.2f} s; memory of one request "
            f"{self.memory / 2**20:.1f} MiB ({self.memory_of}), of a storm {self.storm / 2**20:.1f} MiB; computing "
            f"after the last client {self.left:.2f} s"
        )


worst = Worst()

SAMPLE = "ddq"


class Sample(NamedTuple):
    """Seconds that `/health` took, and those of them in which no thread of the server waited for a core; `memory`."""

    seconds: float
    running: float
    memory: int


class Server:
    """`vattn serve` in a forked process, with whatever this one has patched; it ends with this one."""

    def __init__(self, rng: random.Random) -> None:
        self.key = rng.choice([None, "secret"])
        self.rounds = 0
        options = ["--port", "0", "--kv-cache-memory-bytes", "8MiB", "--max-num-seqs", "16"]
        options += ["--num-threads", "1"]  # so that what goes on for a second computes for a second
        options += ["--kv", rng.choice(["virtual", "virtual", "paged"])]
        options += ["--receive-timeout", rng.choice(["2", "60"])]
        options += ["--max-num-queued-reqs", rng.choice(["8", "4096"])]
        if self.key is not None:
            options += ["--api-key", self.key]
        self._log = os.memfd_create("log")
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os._exit(_serve(options, self._log))
        self.host, self.port = self._address()
        self._samples, write = os.pipe()
        os.set_blocking(self._samples, False)
        self._prober = os.fork()
        if self._prober == 0:
            _probe(self.host, self.port, self.pid, write)
            os._exit(0)
        os.close(write)
        self.answers = [asyncio.run(self.ask(prompt)) for prompt in WELL_BEHAVED]
        self.base_memory = self.memory()
        self.base_descriptors = self.descriptors()
        self.base_threads = self.threads()

    def _address(self) -> tuple[str, int]:
        deadline = time.monotonic() + START_SECONDS
        while True:
            for line in self.log():
                if line.get("message") == "serving":
                    host, _, port = line["url"].removeprefix("http://").rpartition(":")
                    return host, int(port)
            if os.waitpid(self.pid, os.WNOHANG)[0]:
                raise Found("the server does not start", self._logged()[-2000:])
            if time.monotonic() > deadline:
                raise Found("the server does not start", self._logged()[-2000:])
            alive()
            time.sleep(0.05)

    def _logged(self) -> str:
        return os.pread(self._log, os.fstat(self._log).st_size, 0).decode(errors="replace")

    def log(self) -> list[dict[str, Any]]:
        """The lines of the log so far.

        Raises:
            Found: one is no JSON.
        """
        lines = []
        for line in self._logged().splitlines():
            try:
                lines.append(json.loads(line))
            except ValueError:
                raise Found("a line of the log is no JSON", line[:500]) from None
        return lines

    def stop(self) -> None:
        """SIGTERM, which ends it properly."""
        os.kill(self._prober, signal.SIGKILL)
        os.waitpid(self._prober, 0)
        os.kill(self.pid, signal.SIGTERM)
        _, status = os.waitpid(self.pid, 0)
        os.close(self._samples)
        self.check_log()
        os.close(self._log)
        if status:
            raise Found("the server ends with an error", f"status {os.waitstatus_to_exitcode(status)}")

    def kill(self) -> None:
        for pid in (self._prober, self.pid):
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        os.close(self._samples)
        os.close(self._log)

    def check_log(self) -> None:
        for line in self.log():
            if line["level"] not in ("info", "warning") or "traceback" in line:
                raise Found("an error in the log", json.dumps(line)[-3000:])

    # -- what the system says of it --------------------------------------------------------------------------------

    def _status(self, name: str) -> int:
        for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1])
        raise Found("the server died", self._logged()[-2000:])

    def memory(self) -> int:
        """Bytes in use, but for those of the cache: a page counts wherever it is mapped."""
        return 1024 * self._status("RssAnon")

    def threads(self) -> int:
        return self._status("Threads")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def peak(self) -> int:
        """Bytes, with the cache's."""
        return 1024 * self._status("VmHWM")

    def resident(self) -> int:
        """As `peak`, now."""
        return 1024 * self._status("VmRSS")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def cpu(self) -> float:
        """Seconds that it computed."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def samples(self) -> list[Sample]:
        """Those since the last call."""
        data = b""
        with contextlib.suppress(BlockingIOError):
            while read := os.read(self._samples, 2**16):
                data += read
        size = struct.calcsize(SAMPLE)
        return [Sample(*struct.unpack(SAMPLE, data[start : start + size])) for start in range(0, len(data), size)]

    # -- requests --------------------------------------------------------------------------------------------------

    async def get(self, path: str) -> Answer:
        authorization = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        data = f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{authorization}\r\n".encode()
        return await self.send(Attack("get", data, frozenset()))

    async def ask(self, prompt: str, *, stream: bool = False) -> tuple[str, Answer]:
        """The greedy completion of a prompt."""
        content = json.dumps({"prompt": prompt, "max_tokens": 24, "temperature": 0, "stream": stream}).encode()
        authorization = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n{authorization}"
        data = head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content
        answer = await self.send(Attack("well-behaved", data, frozenset()))
        if answer.status == 503:
            return "", answer
        if answer.status != 200:
            raise Found("a well-behaved client gets no answer", f"{answer.status} {answer.body[:500]!r}")
        if not stream:
            return json.loads(answer.body)["choices"][0]["text"], answer
        *events, done, _ = answer.body.decode().split("\n\n")
        if done != "data: [DONE]":
            raise Found("a stream does not end", done)
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        if any("error" in chunk for chunk in chunks):
            raise Found("a well-behaved client gets an error", events[-1])
        return "".join(chunk["choices"][0]["text"] for chunk in chunks), answer

    async def send(self, attack: Attack) -> Answer:
        """Send one request in its manner, and read what comes."""
        answer = Answer()
        try:
            async with asyncio.timeout(PATIENCE):
                await self._send(attack, answer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        except TimeoutError:
            raise Found("a request is not answered", f"{attack.kind} (attack {attack.number})") from None
        return answer

    async def _send(self, attack: Attack, answer: Answer) -> None:
        reader, writer = await asyncio.open_connection(self.host, self.port, limit=2**18)
        try:
            size = max(1, -(-len(attack.data) // attack.pieces))
            for start in range(0, len(attack.data), size):
                writer.write(attack.data[start : start + size])
                with contextlib.suppress(ConnectionError):  # it may have answered already
                    async with asyncio.timeout(attack.leave if attack.leave else None):
                        await writer.drain()
                await asyncio.sleep(attack.pause)
            if attack.half and writer.can_write_eof():
                with contextlib.suppress(OSError):
                    writer.write_eof()
            if attack.stall:
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(attack.stall)
                writer.transport.resume_reading()  # type: ignore[attr-defined]
            async with asyncio.timeout(attack.leave):
                await _read(reader, answer, has_body=not _is_head(attack))
        except TimeoutError:
            if attack.leave is None:
                raise
        finally:
            writer.transport.abort()


def _is_head(attack: Attack) -> bool:
    return attack.data.startswith(b"HEAD ")


async def _read(reader: asyncio.StreamReader, answer: Answer, *, has_body: bool) -> None:
    while True:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        status = int(head[0].split(" ")[1])
        if status >= 200:
            break
    answer.headers = dict(line.lower().split(": ", 1) for line in head[1:] if ": " in line)
    answer.status = status
    if not has_body:
        return
    if "content-length" in answer.headers:
        answer.body = await reader.readexactly(int(answer.headers["content-length"]))
        return
    while (size := int(await reader.readuntil(b"\r\n"), 16)) > 0:
        chunk = await reader.readexactly(size + 2)
        answer.times.append(time.monotonic())
        if len(answer.body) < 2**23:
            answer.body += chunk[:-2]


def _serve(options: list[str], log: int) -> int:
    die_with_parent()
    os.dup2(log, 2)
    signal.set_wakeup_fd(-1)
    from vattn.engine.cli import main

    try:
        return main(["serve", *options])
    except BaseException as error:
        print(f"vattn serve raised {error!r}", file=sys.stderr, flush=True)
        return 70


def _probe(host: str, port: int, pid: int, write: int) -> None:
    """Asks for `/health` again and again, and writes how long it took."""
    die_with_parent()
    os.set_blocking(write, False)
    request = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"

    def waited() -> float:
        total = 0
        for task in [*Path(f"/proc/{pid}/task").iterdir(), Path("/proc/self")]:
            with contextlib.suppress(OSError):
                total += int((task / "schedstat").read_text().split()[1])
        return total / 1e9

    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port)) as connection:
            while True:
                before, begun = waited(), time.monotonic()
                connection.sendall(request)
                if not connection.recv(4096):
                    break
                seconds = time.monotonic() - begun
                running = max(0.0, seconds - (waited() - before))
                status = Path(f"/proc/{pid}/status").read_text()
                memory = 1024 * int(status.partition("RssAnon:")[2].split()[0])
                with contextlib.suppress(BlockingIOError):
                    os.write(write, struct.pack(SAMPLE, seconds, running, memory))
                time.sleep(PERIOD)
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(PERIOD)


_server: Server | None = None


def _running(rng: random.Random) -> Server:
    """The server of this process, which is a new one now and then."""
    global _server
    if _server is not None and _server.rounds >= ROUNDS:
        done, _server = _server, None
        done.stop()
    if _server is None:
        _server = Server(rng)
    return _server


def scenario(rng: random.Random) -> Played:
    """One round."""
    global _server
    played = Played()
    numbers: list[int] = []
    try:
        server = _running(random.Random(rng.random()))
        server.rounds += 1
        _round(server, rng, played, numbers)
    except Found as found:
        played.kind, played.detail = found.kind, str(found)
        if _server is not None:
            _server.kill()
            _server = None
    played.lines = [
        "from tests.campaign.server import again",
        "",
        f"again({numbers})  # the first one alone, the others at once",
    ]
    return played


def again(numbers: list[int]) -> None:
    """Plays attacks of a round again, and prints what becomes of them."""
    played = Played()
    server = Server(random.Random(0))
    try:
        _alone(server, draw(numbers[0], server.key), played)
        asyncio.run(_storm(server, [draw(number, server.key) for number in numbers[1:]], played))
        _settle(server)
    finally:
        server.kill()
        print(played.counts, worst, sep="\n")


def _round(server: Server, rng: random.Random, played: Played, numbers: list[int]) -> None:
    alone = draw(rng.getrandbits(40), server.key)
    while not alone.heavy:
        alone = draw(rng.getrandbits(40), server.key)
    attacks = [draw(rng.getrandbits(40), server.key) for _ in range(rng.choice([10, 20, 30]))]
    numbers += [attack.number for attack in (alone, *attacks)]
    _alone(server, alone, played)
    asyncio.run(_storm(server, attacks, played))
    _settle(server)


def _alone(server: Server, attack: Attack, played: Played) -> None:
    """The memory that one request takes."""
    server.samples()
    before, resident = server.memory(), server.resident()
    server.forget_peak()
    answer = asyncio.run(server.send(attack))
    _judge(attack, answer, played)
    _settle(server)
    samples = server.samples()
    taken = max((sample.memory for sample in samples), default=before) - before
    if answer.status >= 400:  # nothing was computed
        taken = server.peak() - resident
    if taken > worst.memory:
        worst.memory, worst.memory_of = taken, f"{attack.kind}, attack {attack.number}"
    if taken > MOST_BYTES:
        raise Found("a request takes too much memory", f"{attack.kind} took {taken / 2**20:.0f} MiB")
    _look_at_health(samples, f"{attack.kind}, attack {attack.number} alone")


async def _storm(server: Server, attacks: list[Attack], played: Played) -> None:
    """Many at once, beside clients that behave."""
    server.samples()
    before = server.memory()
    over = asyncio.Event()

    async def attacked(attack: Attack) -> None:
        _judge(attack, await server.send(attack), played)

    async def behave(which: int) -> None:
        want = server.answers[which][0]
        while not over.is_set():
            begun = time.monotonic()
            text, answer = await server.ask(WELL_BEHAVED[which], stream=True)
            played.counts["well-behaved"] += 1
            if answer.status == 503:
                await asyncio.sleep(0.05)
                continue
            if text != want:
                raise Found("a well-behaved client gets another answer", f"{text!r}, alone {want!r}")
            times = [begun, *answer.times]
            worst.first_token = max(worst.first_token, times[1] - begun)
            gaps = [after - before for before, after in pairwise(times[1:])]
            worst.between_tokens = max(worst.between_tokens, *gaps, 0.0)

    behaving = [asyncio.ensure_future(behave(which)) for which in range(len(WELL_BEHAVED))]
    try:
        async with asyncio.TaskGroup() as group:
            for attack in attacks:
                group.create_task(attacked(attack))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    finally:
        over.set()
        results = await asyncio.gather(*behaving, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    samples = server.samples()
    taken = max((sample.memory for sample in samples), default=before) - before
    worst.storm = max(worst.storm, taken)
    if taken > MOST_STORM_BYTES:
        raise Found("requests take too much memory together", f"{taken / 2**20:.0f} MiB")
    _look_at_health(samples, "many at once")


def _look_at_health(samples: list[Sample], when: str) -> None:
    for sample in samples:
        worst.health = max(worst.health, sample.seconds)
        worst.health_running = max(worst.health_running, sample.running)
    if most_health_seconds is not None and samples and max(samples).seconds > most_health_seconds:
        seconds, running, _ = max(samples)
        detail = f"{1000 * seconds:.0f} ms, {1000 * running:.0f} ms without waits for a core; {when}"
        raise Found("/health waits", detail)


def _judge(attack: Attack, answer: Answer, played: Played) -> None:
    """Whether an answer is one of those that are right."""
    played.calls += 1
    kind = attack.kind.partition(":")[0]
    played.counts[kind] += 1
    if answer.status:
        played.counts[f"status {answer.status}"] += 1
    told = f"{attack.kind} (attack {attack.number}) got {answer.status} {answer.body[:300]!r}"
    if answer.status >= 500 and answer.status != 503:
        raise Found("a request gets a server error", told)
    if attack.statuses and answer.status not in attack.statuses:
        raise Found(f"{kind}: a wrong status", told)
    is_json = answer.headers.get("content-type", "") == "application/json" and not _is_head(attack)
    if answer.status >= 400 and is_json:
        try:
            error = json.loads(answer.body)["error"]
            assert error.keys() == {"message", "type", "param", "code"}
        except (ValueError, KeyError, AssertionError):
            raise Found("an error of another shape", told) from None
        if attack.code is not None and error["code"] != attack.code:
            raise Found(f"{kind}: another error than {attack.code}", told)
        if len(answer.body) > MOST_MESSAGE_BYTES:
            raise Found("a long error", f"{len(answer.body)} bytes: {told}")
    if answer.status == 200 and attack.check is not None and is_json:
        try:
            attack.check(json.loads(answer.body))
        except (ValueError, AssertionError) as error:
            raise Found(f"{kind}: a wrong answer", f"{error}; {told}") from None


def _settle(server: Server) -> None:
    """Until nothing is left; of nothing more than before."""
    begun = server.cpu()
    quiet = 0
    while quiet < 3:
        before = server.cpu()
        time.sleep(0.1)
        quiet = quiet + 1 if server.cpu() - before < 0.03 else 0
        _look_at_computing(server, begun)
    deadline = time.monotonic() + PATIENCE
    while True:
        figures = _samples(asyncio.run(server.get("/metrics")).body.decode())
        left = {name: figures[name] for name in GAUGES if figures.get(name)}
        if not left:
            break
        _look_at_computing(server, begun)  # on a busy machine it may look quiet before it is
        if time.monotonic() > deadline:
            raise Found("something is left when all clients have left", f"{left}")
        time.sleep(0.1)
    pages = {kind: figures[f"vattn:pages_{kind}"] for kind in ("budget", *PARTS) if f"vattn:pages_{kind}" in figures}
    if pages and pages["budget"] != sum(pages[kind] for kind in PARTS):
        raise Found("pages are missing", f"{pages}")
    if json.loads(asyncio.run(server.get("/load")).body) != {"server_load": 0}:
        raise Found("requests are left when all clients have left", "see /load")
    if server.memory() - server.base_memory > MOST_KEPT_BYTES:
        raise Found("memory is not given back", f"{(server.memory() - server.base_memory) / 2**20:.0f} MiB in all")
    while server.descriptors() > server.base_descriptors + 8:  # of grammars and kept connections
        if time.monotonic() > deadline:
            raise Found("descriptors are left", f"{server.descriptors()}, {server.base_descriptors} before")
        time.sleep(0.1)
    if server.threads() > server.base_threads + 32:
        raise Found("threads are left", f"{server.threads()}, {server.base_threads} before")
    server.check_log()


def _look_at_computing(server: Server, begun: float) -> None:
    left = server.cpu() - begun
    worst.left = max(worst.left, left)
    if left > MOST_CPU_SECONDS:
        detail = f"for {left:.1f} s of computing\n{stacks_of(server.pid)}"
        raise Found("work goes on when all clients have left", detail)


def _samples(text: str) -> dict[str, float]:
    pairs = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name.partition("{")[0]: float(value) for name, value in pairs}


def _rounds(seed: int) -> Iterator[random.Random]:
    for number in range(10**9):
        yield random.Random(f"{seed}/server/{number}")


def main() -> int:
    """The long form, for an idle machine; the exit status says whether anything was found."""
    global most_health_seconds
    parser = argparse.ArgumentParser(prog="python -m tests.campaign.server", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--health", type=float, help="seconds that /health may take; default: as long as it likes")
    parser.add_argument("--findings", type=int, default=1, help="go on until so many are found")
    options = parser.parse_args()
    most_health_seconds = options.health
    end = time.monotonic() + 60 * options.minutes
    counts: Counter[str] = Counter()
    calls = rounds = found = 0
    for rng in _rounds(options.seed):
        played = scenario(rng)
        rounds += 1
        calls += played.calls
        counts += played.counts
        if played.kind is not None:
            found += 1
            print("FOUND", played.detail, *played.lines, sep="\n", flush=True)
        if found >= options.findings or time.monotonic() > end:
            break
    if _server is not None:
        _server.stop()
    print(f"{calls:,} requests in {rounds} rounds; {found} found\n{dict(counts.most_common())}\nworst: {worst}")
    return 1 if found else 0


if __name__ == "__main__":
    # Once, whatever this module is called, so that attacks and servers are of one kind.
    from tests.campaign import server

    sys.exit(server.main())
