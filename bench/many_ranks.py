"""What ranks tell each other through the store, for as many ranks as a cluster has: messages, bytes, seconds.

    python -m bench.many_ranks bench/results/many-ranks.json --beside ../before

There is one store, as torchrun has it, and a connection to it for each simulated rank, with the real board, the real
meetings and the real watchdog's thread of `fsdp_compiled.distributed`; what they would compute is left out. Ranks are
threads of some processes, which share this machine's cores with the store: times are upper bounds. Four things are
looked at:

    steps       each rank makes four calls a second
    a meeting   all ranks come to one at the same time, as before each compilation and checkpoint
    odd         the same, where the last rank came with another call: each rank hears so
    waiting     all ranks are in a call that does not return, and the watchdogs look why

``--beside``: another checkout of the package, measured in turns with this one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WORLDS = (256, 1024)
PERIOD, STEPS, WAITING = 0.25, 24, 16.0  # seconds between calls, calls, seconds
LABEL = "step (int64[8, 4096], int64[8, 4096])"
PROCESSOR = "the store's processor time, s"
LIMIT = timedelta(minutes=20)


class Counted:
    """A store, and what went to it and came from it: keys and values, without TCP's own."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.messages = self.bytes = 0

    def _count(self, size: int) -> None:
        self.messages += 1
        self.bytes += size

    def set(self, key: str, value: str) -> None:
        self._count(len(key) + len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value: bytes = self._store.get(key)
        self._count(len(key) + len(value))
        return value

    def check(self, keys: list[str]) -> bool:
        self._count(sum(map(len, keys)))
        return bool(self._store.check(keys))

    def add(self, key: str, count: int) -> int:
        self._count(len(key) + 8)
        return int(self._store.add(key, count))

    def delete_key(self, key: str) -> bool:
        self._count(len(key))
        return bool(self._store.delete_key(key))


class Ranks:
    """Those of this process."""

    def __init__(self, port: int, first: int, count: int, world: int) -> None:
        from fsdp_compiled.distributed.call_log import Calls
        from fsdp_compiled.distributed.call_store import Board
        from fsdp_compiled.distributed.mesh import Mesh
        from fsdp_compiled.distributed.watchdog import Watchdog

        self.world, self.first = world, first
        self.store = connect(port)
        self.counted, self.calls = [], []
        for rank in range(first, first + count):
            counted: Any = Counted(connect(port))
            calls = Calls(Mesh(torch.device("cpu")))
            calls.mesh, calls.board = Mesh(torch.device("cpu"), shard=world, rank=rank), Board(counted, rank, world)
            calls.watchdog = Watchdog(calls.board, cuts=False)
            calls.watchdog.start()
            self.counted.append(counted)
            self.calls.append(calls)
        self.pool = ThreadPoolExecutor(count)
        self._barriers = 0

    def barrier(self) -> None:
        """All processes are here."""
        self._barriers += 1
        key = f"barrier/{self._barriers}"
        if self.store.add(key, len(self.calls)) == self.world:
            self.store.set(f"{key}/open", "")
        self.store.wait([f"{key}/open"], LIMIT)

    def measured(self, work: Callable[[], Any]) -> dict[str, Any]:
        """What each rank sent and received in it, and how long it took."""
        self.barrier()
        before = [(one.messages, one.bytes) for one in self.counted]
        began = time.monotonic()
        found = work()
        seconds = time.monotonic() - began
        pairs = zip(self.counted, before, strict=True)
        sent = [(one.messages - messages, one.bytes - size) for one, (messages, size) in pairs]
        return {"seconds": seconds, "sent": sent, "found": found}

    def steps(self) -> list[float]:
        posts, began = [], time.monotonic()
        for step in range(STEPS):
            time.sleep(max(0.0, began + PERIOD * step - time.monotonic()))
            for calls in self.calls:
                calls.hypers = f"{step:015x}"  # a rate that changes with each
                since = time.perf_counter()
                calls.post(LABEL, "5c1d09aa")
                posts.append(time.perf_counter() - since)
                calls.returned()
        time.sleep(max(0.0, began + PERIOD * STEPS - time.monotonic()))
        return posts

    def meet(self, odd: bool) -> list[bool]:
        def one(calls: Any) -> bool:
            label = "save to elsewhere" if odd and calls.mesh.rank == self.world - 1 else "save to runs/a"
            try:
                calls.post(label)
                calls.meet(label)
            except RuntimeError:
                return False
            finally:
                calls.returned()
            return True

        return list(self.pool.map(one, self.calls))

    def wait(self) -> None:
        for calls in self.calls:
            calls.post(LABEL, "5c1d09aa")
        time.sleep(WAITING)
        for calls in self.calls:
            calls.returned()

    def run(self) -> dict[str, Any]:
        parts = {"steps": self.steps, "meeting": lambda: self.meet(False)}
        parts |= {"waiting": self.wait, "odd": lambda: self.meet(True)}
        found = {name: self.measured(work) for name, work in parts.items()}
        for calls in self.calls:
            assert calls.watchdog is not None
            calls.watchdog.stop()
        return found


def connect(port: int) -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=LIMIT)


def simulate(world: int, processes: int, checkout: Path) -> dict[str, Any]:
    """Of one world, what `Ranks` found, for a rank at the middle and for the one that sent most."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=LIMIT, wait_for_workers=False)
    share = world // processes
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    began = time.process_time()
    children = [
        subprocess.Popen(
            [sys.executable, __file__, "-", "--part", f"{store.port}", f"{index * share}", f"{share}", f"{world}"],
            env=environment, stdout=subprocess.PIPE, text=True,
        )
        for index in range(processes)
    ]  # fmt: skip
    said = [json.loads(child.communicate()[0].splitlines()[-1]) for child in children]
    found: dict[str, Any] = {"ranks": world, PROCESSOR: round(time.process_time() - began, 2)}
    for part in said[0]:
        parts = [one[part] for one in said]
        sent = sorted(pair for one in parts for pair in one["sent"])
        seconds = max(one["seconds"] for one in parts)
        row: dict[str, Any] = {"seconds": round(seconds, 3)}
        for name, index in (("messages", 0), ("bytes", 1)):
            numbers = sorted(pair[index] for pair in sent)
            row[name] = {"median": statistics.median(numbers), "most": numbers[-1]}
        if part == "steps":
            posts = sorted(post for one in parts for post in one["found"])
            row["a post, us"] = {"median": round(1e6 * statistics.median(posts), 1)}
            row["a post, us"]["99 of 100"] = round(1e6 * posts[len(posts) * 99 // 100], 1)
        elif part in ("meeting", "odd"):
            heard = {one for answers in parts for one in answers["found"]}
            assert heard == {part == "meeting"}, (part, heard)
        found[part] = row
    return found


def describe(result: Mapping[str, Any]) -> str:
    """A table: a line for each world and each version."""
    calls, waits = result["calls a second"], result["seconds in a call that does not return"]
    lines = [
        "| ranks | | rows a second | bytes a second | a meeting, s | its messages | its bytes "
        "| the same, one rank odd, s | messages a second in a call that lasts | the store's processor time, s |",
        "|--:|---" + "|--:" * 8 + "|",
    ]
    names = {"now": "now", "beside": "the version before"}
    every = [(row["ranks"], name, row) for name, rows in result["a rank's"].items() for row in rows]
    for world, name, row in sorted(every, key=lambda one: (one[0], one[1] == "now")):
        steps, meeting, odd, waiting = (row[part] for part in ("steps", "meeting", "odd", "waiting"))
        lines.append(
            f"| {world:,} | {names[name]} | {steps['messages']['median'] / steps['seconds']:.1f} "
            f"| {steps['bytes']['median'] / steps['seconds']:,.0f} | {meeting['seconds']:.1f} "
            f"| {meeting['messages']['median']:,.0f} | {meeting['bytes']['median']:,.0f} | {odd['seconds']:.1f} "
            f"| {waiting['messages']['median'] / waiting['seconds']:.1f} "
            f"| {row[PROCESSOR]:.1f} |"
        )
    said = f"A rank makes {calls:g} calls a second; the call that lasts lasts {waits:g} s. Of each rank's numbers,"
    return "\n".join([f"{said} the median.", "", *lines, "", *at_scale(result["a rank's"]["now"])])


def at_scale(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the store's one thread would have to do for more ranks than were simulated: what a message takes it, times
    how many there are. Ranks post, and look while they wait, less often the more there are (`Board.interval`)."""
    from fsdp_compiled.distributed.call_store import Board
    from fsdp_compiled.distributed.watchdog import BEAT

    parts, last = ("steps", "meeting", "odd", "waiting"), max(rows, key=lambda row: row["ranks"])
    sent = {part: last[part]["messages"]["median"] for part in parts}
    each = last[PROCESSOR] / last["ranks"] / sum(sent.values())
    look = sent["waiting"] / last["waiting"]["seconds"]  # messages of one look, at one a second
    lines = [
        f"A message takes the store {1e6 * each:.0f} us of processor time. By that, of its one thread:",
        "",
        "| ranks | posts, at most | ranks in a call that lasts | a meeting | one rank odd |",
        "|--:|--:|--:|--:|--:|",
    ]
    for world in (1024, 4096, 16384, 65536):
        posted = max(min(100 * world, Board.RATE), world / BEAT) * each
        looked = world * look * each / max(1.0, 4 * world / Board.RATE)
        times = (f"{world * sent[part] * each:.1f} s" for part in ("meeting", "odd"))
        lines.append(f"| {world:,} | {posted:.0%} | {looked:.0%} | {' | '.join(times)} |")
    return [*lines, "", "What hurts first is a meeting, and an error that all ranks are told; steps do not."]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, nargs="+", default=WORLDS)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--beside", type=Path, help="another checkout, whose figures stand beside this one's")
    parser.add_argument("--beside-ranks", type=int, default=1024, help="the most ranks that it is measured with")
    parser.add_argument("--part", type=int, nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.part is not None:
        found = Ranks(*given.part).run()
        print(json.dumps(found), flush=True)
        os._exit(0)  # nobody waits for a thousand threads
    from fsdp_compiled.cli.machine import hardware

    rows: dict[str, list[dict[str, Any]]] = {}
    for world in given.ranks:
        places = {"now": Path.cwd()}
        if given.beside is not None and world <= given.beside_ranks:
            places["beside"] = given.beside
        for name, place in places.items():
            row = simulate(world, given.processes, place)
            print(name, json.dumps(row), flush=True)
            rows.setdefault(name, []).append(row)
    record = {
        "command": f"python -m bench.many_ranks {given.out}"
        + f" --ranks {' '.join(map(str, given.ranks))}" * (tuple(given.ranks) != WORLDS)
        + f" --beside {given.beside}" * bool(given.beside),
        "hardware": hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "calls a second": 1 / PERIOD,
        "seconds in a call that does not return": WAITING,
        "a rank's": rows,
    }
    given.out.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
