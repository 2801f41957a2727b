"""A bounded load on the service, on this machine alone: a steady rate below capacity, too many at
once, and memory.

    python benchmarks/serve_load.py                  20,000 requests at a steady rate, 4,000 before:
    some minutes python benchmarks/serve_load.py --requests 500   a try

It starts `qualms serve` with a small network of its own and `entropy`, and writes a row for each
part to benchmarks/results/serve_load.jsonl. Needs the extra `serve`, and psutil.
Clients are plain sockets, so that they take little from the service, with which they share the
machine.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import nn

RESULTS = Path(__file__).parent / "results" / "serve_load.jsonl"
SIZE = 32  # pixels a side, in color
WAITING = 64  # requests that the service lets in
BELOW, ABOVE = 0.6, 2.0  # parts of the capacity that are asked for
PATIENCE = 120  # seconds for the start
IDLE = 3.0  # seconds after which a connection is not used again: the service closes it after five
MEGABYTE = 2**20
GROWTH = 1.1  # the most that memory may grow by, from a twentieth of the steady part to its end


def network() -> nn.Module:
    """Small, and the same in every process; its scores mean nothing."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, stride=2),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


@dataclass
class Seen:
    """What came back."""

    statuses: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    memory: list[tuple[int, float]] = field(
        default_factory=list
    )  # requests answered, and megabytes then

    def row(self, part: str, took: float) -> dict[str, Any]:
        """As it is written."""
        quick = np.array(self.seconds or [np.nan])
        return {
            "part": part,
            "requests": self.statuses.total(),
            "statuses": dict(self.statuses),
            "seconds": round(took, 2),
            "per_second": round(self.statuses.total() / took, 1),
            "median_ms": round(1000 * float(np.median(quick)), 1),
            "p99_ms": round(1000 * float(np.quantile(quick, 0.99)), 1),
            "memory_mb": [[n, round(mb, 1)] for n, mb in self.memory],
        }


class Connections:
    """Connections to the service that are kept open, as many as are needed at once."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.free: list[
            tuple[float, asyncio.StreamReader, asyncio.StreamWriter]
        ] = []  # and when it was used last

    async def post(self, body: bytes) -> str:
        """The status of the answer."""
        while self.free and self.free[0][0] < time.monotonic() - IDLE:
            self.free.pop(0)[-1].close()
        reader, writer = (
            self.free.pop()[1:]
            if self.free
            else await asyncio.open_connection("127.0.0.1", self.port)
        )
        head = f"POST /v1/score HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        status, *fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower().splitlines()
        length = next(
            int(field.partition(":")[2]) for field in fields if field.startswith("content-length:")
        )
        await reader.readexactly(length)
        self.free.append((time.monotonic(), reader, writer))
        return status.split()[1]

    def close(self) -> None:
        """Close those that nobody uses."""
        for *_, writer in self.free:
            writer.close()


@dataclass
class Load:
    """One running service, and who asks it."""

    port: int
    process: psutil.Process
    bodies: list[bytes]

    async def ask(self, by: Connections, seen: Seen, number: int) -> None:
        """One request."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(PATIENCE):
                status = await by.post(self.bodies[number % len(self.bodies)])
        except (OSError, EOFError, TimeoutError) as error:
            status = type(error).__name__
        seen.statuses[status] += 1
        if status == "200":
            seen.seconds.append(time.perf_counter() - began)

    def memory(self) -> float:
        """Megabytes of all processes of the service that nobody else has."""
        every = [self.process, *self.process.children(recursive=True)]
        return sum(p.memory_full_info().uss for p in every) / MEGABYTE

    async def closed(self, part: str, requests: int, workers: int) -> dict[str, Any]:
        """So many at a time, each asking again as soon as it is answered."""
        seen, left, by = Seen(), iter(range(requests)), Connections(self.port)

        async def work() -> None:
            for number in left:
                await self.ask(by, seen, number)

        began = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(workers)))
        by.close()
        return seen.row(part, time.perf_counter() - began)

    async def steady(self, part: str, requests: int, rate: float) -> dict[str, Any]:
        """At a fixed rate, whether the answers keep up or not; memory is looked at twenty times."""
        seen, running, by = Seen(), set[asyncio.Task[None]](), Connections(self.port)
        began = time.perf_counter()
        for number in range(requests):
            await asyncio.sleep(max(0.0, began + number / rate - time.perf_counter()))
            task = asyncio.create_task(self.ask(by, seen, number))
            running.add(task)
            task.add_done_callback(running.discard)
            if number % max(1, requests // 20) == 0:
                seen.memory.append(
                    (number, await asyncio.to_thread(self.memory))
                )  # not in the clients' way
        await asyncio.gather(*running)
        took = time.perf_counter() - began
        seen.memory.append((requests, await asyncio.to_thread(self.memory)))
        by.close()
        return seen.row(part, took) | {"asked_per_second": round(rate, 1)}


def started(port: int) -> subprocess.Popen[bytes]:
    """The service, once it is ready."""
    words = ["serve", "--model", "serve_load:network", "--methods", "entropy", "--size", str(SIZE)]
    words += [
        "--mean",
        "0.5,0.5,0.5",
        "--std",
        "0.5,0.5,0.5",
        "--port",
        str(port),
        "--waiting",
        str(WAITING),
    ]
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    process = subprocess.Popen(
        [sys.executable, "-m", "qualms", *words], env={**os.environ, "PYTHONPATH": paths}
    )
    for _ in range(2 * PATIENCE):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=PATIENCE):
                return process
        except OSError:  # not yet
            pass
        if process.poll() is not None:
            break
        time.sleep(0.5)
    process.terminate()
    raise SystemExit("the service did not start")


async def measured(load: Load, requests: int) -> list[dict[str, Any]]:
    """All requests at a steady rate below capacity, after a tenth as many to find it, and as many
    above it.
    """
    some = max(50, requests // 10)
    await load.closed("first", 50, 8)
    capacity = await load.closed("capacity: 32 at a time", some, WAITING // 2)
    above = await load.steady(f"at {ABOVE:.0%} of capacity", some, ABOVE * capacity["per_second"])
    steady = await load.steady(
        f"at {BELOW:.0%} of capacity", requests, BELOW * capacity["per_second"]
    )
    return [capacity, above, steady]


def main() -> None:
    """Start, measure, stop, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (1, SIZE, SIZE, 3)).tolist() for _ in range(16)]
    process = started(port)
    try:
        bodies = [json.dumps({"images": image}).encode() for image in images]
        load = Load(port, psutil.Process(process.pid), bodies)
        rows = asyncio.run(measured(load, given.requests))
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    given.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        print({key: value for key, value in row.items() if key != "memory_mb"})
    _, above, steady = (set(row["statuses"]) for row in rows)
    if steady != {"200"} or not above <= {"200", "429"}:
        raise SystemExit(
            "there were errors: the steady rate has only 200, and above capacity there is otherwise only 429"
        )
    memory = rows[-1]["memory_mb"]
    print(
        f"memory: {memory[1][1]} MB after {memory[1][0]} requests, {memory[-1][1]} MB after {memory[-1][0]}"
    )
    if memory[-1][1] > GROWTH * memory[1][1]:
        raise SystemExit(
            "memory grew by more than a tenth over the steady part; look for what is kept"
        )


if __name__ == "__main__":
    main()
