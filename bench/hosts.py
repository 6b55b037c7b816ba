"""Hosts on this machine: Linux network namespaces, cabled to a switch of a given rate and delay.

    host 0                             the switch                              host 1
    TCP ── eth0 10.77.0.1 ── tap ──┬── rate ── delay ──┬── tap ── eth0 10.77.0.2 ── TCP
                                   └── delay ── rate ──┘

What runs in them is real but for the wire: torchrun, the store, gloo, TCP with its windows and retransmissions, and the
kernel's counters of each network card. A cable can be pulled, which nobody tells the hosts, and put back; a host can
die, which nobody tells the others.

The switch is a process of its own that reads frames from one TAP device and writes them to another, later. It takes a
host's next frame once the one before has left at its rate: so a host that sends too much waits, as behind a real card,
and no frame is lost but those that are to be (``loss``). (tc's ``tbf`` has a rate but no delay, and ``netem``, which
has both, is missing from many kernels.) The switch and all namespaces end with the process that made them, however that
ends.

Needs Linux, root, ``ip``, ``unshare`` and ``/dev/net/tun``: `missing` says what is not there.

    python -m bench.hosts --hosts 2 --gbps 1 --delay-ms 5 --nproc 2 script.py ARGS      under torchrun, 2 ranks a host
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import heapq
import os
import random
import select
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

TUN = Path("/dev/net/tun")
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # <linux/if_tun.h>
MTU = 16_000  # bytes: few enough frames for a switch in Python, small enough that none holds up the next for long
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")
AHEAD = 0.002  # seconds of frames that the switch takes from a host before their turn
PORT = 29500  # of torchrun's store
# Seconds in which a host may still join, and without a sign of life of another's torchrun.
QUICK = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"


@functools.cache
def missing() -> str | None:
    """Why there can be no hosts here; None where there can: one is made, and removed."""
    if not sys.platform.startswith("linux"):
        return "network namespaces are Linux's"
    if os.geteuid():
        return "network namespaces need root"
    if lacking := [name for name in ("ip", "unshare") if shutil.which(name) is None]:
        return f"{' and '.join(lacking)} not found"
    name = f"fsdp-{os.getpid()}-trial"
    try:
        _run("ip", "netns", "add", name)
        os.close(_tap(f"t{os.getpid() % 10**6}trial", name, 0))
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)} fails: {error.stderr.strip()}"
    except OSError as error:
        return f"{TUN} cannot be used: {error.strerror}"
    finally:
        _remove([name])
    return None


class Host:
    """One of them; ``number`` counts from 0."""

    def __init__(self, number: int, namespace: str, control: int) -> None:
        self.number, self.namespace, self.address = number, namespace, f"10.77.0.{number + 1}"
        self._control = control
        self._started: list[subprocess.Popen[Any]] = []

    def popen(self, command: Sequence[str], env: Mapping[str, str] | None = None, **more: Any) -> subprocess.Popen[Any]:
        """Starts the command in this host, whose name there is ``host0``, ``host1``, ..."""
        named = f'echo host{self.number} > /proc/sys/kernel/hostname && exec "$@"'
        inside = ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", named, "sh", *command]
        # gloo would look up the host's name.
        environment = {**(os.environ if env is None else env), "GLOO_SOCKET_IFNAME": "eth0"}
        self._started.append(subprocess.Popen(inside, env=environment, **more))
        return self._started[-1]

    def pull(self) -> None:
        """Pulls its cable: from now on frames from and to it are lost."""
        os.write(self._control, f"-{self.number}\n".encode())

    def plug(self) -> None:
        """Puts its cable back."""
        os.write(self._control, f"+{self.number}\n".encode())

    def die(self) -> None:
        """Ends all that runs in it, of which the others hear nothing."""
        self.pull()
        time.sleep(0.1)
        self.end()

    def end(self) -> None:
        """Ends all that runs in it."""
        while pids := _run("ip", "netns", "pids", self.namespace).split():  # some may be starting others
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.02)
        for process in self._started:
            process.wait()

    def sent(self) -> int:
        """Bytes that its network card has sent so far, as `sent` has it."""
        return int(_run("ip", "netns", "exec", self.namespace, "cat", str(SENT)))


def sent() -> int:
    """Bytes that the network card of the host that this process is in has sent, as the kernel counts: frames with all
    headers. 0 where it is in none."""
    return int(SENT.read_text()) if SENT.exists() else 0


@contextmanager
def hosts(count: int, gbps: float, delay: float = 0.0, loss: float = 0.0) -> Iterator[list[Host]]:
    """So many hosts; ``gbps``: gigabits per second of each one's card, in each direction; ``delay``: seconds from card
    to card; ``loss``: the share of frames that the switch loses."""
    if (why := missing()) is not None:
        raise RuntimeError(f"no hosts can be made here: {why}")
    names = [f"fsdp-{os.getpid()}-{time.monotonic_ns() % 10**6}-{number}" for number in range(count)]
    reading, control = os.pipe()
    os.set_inheritable(reading, True)
    taps: list[int] = []
    process: subprocess.Popen[bytes] | None = None
    made: list[Host] = []
    try:
        for number, name in enumerate(names):
            _run("ip", "netns", "add", name)
            taps.append(_tap(f"t{os.getpid() % 10**6}n{number}", name, number))
        command = [sys.executable, "-P", __file__, "--switch", f"{gbps}", f"{delay}", f"{loss}", f"{reading}"]
        command += [f"{tap}:{name}" for tap, name in zip(taps, names, strict=True)]
        process = subprocess.Popen(command, pass_fds=(reading, *taps), start_new_session=True)
        made += [Host(number, name, control) for number, name in enumerate(names)]
        yield made
    finally:
        for host in made:
            host.end()
        os.close(control)  # the switch ends by it
        os.close(reading)
        for tap in taps:
            os.close(tap)
        if process is None:
            _remove(names)
        else:
            process.wait()


def _tap(device: str, namespace: str, number: int) -> int:
    """A host's network card; what is read from the descriptor is what the host sends."""
    tap = os.open(TUN, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TAP | IFF_NO_PI))
    os.set_inheritable(tap, True)
    _run("ip", "link", "set", device, "netns", namespace, "name", "eth0")
    for arguments in (
        ("link", "set", "lo", "up"),
        ("link", "set", "eth0", "mtu", str(MTU), "up"),
        ("addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0"),
    ):
        _run("ip", "-n", namespace, *arguments)
    return tap


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def _remove(namespaces: Sequence[str]) -> None:
    for name in namespaces:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _switch(gbps: float, delay: float, loss: float, control: int, taps: Sequence[int]) -> None:
    """Carries frames until whoever holds the other end of ``control`` ends."""
    seconds = 8e-9 / gbps  # a byte
    count = len(taps)
    out, into = [0.0] * count, [0.0] * count  # when each host's card is done with what it has sent and received
    plugged = [True] * count
    ports: dict[bytes, int] = {}  # by hardware address, as learned from what hosts sent
    waiting: list[tuple[float, int, int, bytes]] = []  # when it arrives, in what order, at whom, the frame
    taken = 0
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, _, target, frame = heapq.heappop(waiting)
            if plugged[target]:
                with suppress(OSError):  # its queue is full, or the host is being removed
                    os.write(taps[target], frame)
        listening = [port for port in range(count) if out[port] <= now + AHEAD]
        times = [out[port] - AHEAD for port in range(count) if port not in listening]
        until = min([*times, *(one[0] for one in waiting[:1])], default=now + 1.0)
        ready, _, _ = select.select([control, *(taps[port] for port in listening)], [], [], max(0.0, until - now))
        if control in ready:
            commands = os.read(control, 1 << 12).decode()
            if not commands:
                return
            for command in commands.split():
                plugged[int(command[1:])] = command[0] == "+"
        now = time.monotonic()
        for port in listening:
            while taps[port] in ready and out[port] <= now + AHEAD:
                try:
                    frame = os.read(taps[port], 1 << 17)
                except BlockingIOError:
                    break
                out[port] = max(now, out[port]) + len(frame) * seconds
                if not plugged[port] or (loss and random.random() < loss):
                    continue
                ports[frame[6:12]] = port
                known = ports.get(frame[:6])
                for target in [known] if known is not None else range(count):
                    if target != port:
                        into[target] = max(out[port] + delay, into[target] + len(frame) * seconds)
                        taken += 1
                        heapq.heappush(waiting, (into[target], taken, target, frame))


def torchrun(
    among: Sequence[Host], nproc: int, arguments: Sequence[str], fewest: int | None = None, **more: Any
) -> list[subprocess.Popen[Any]]:
    """Starts torchrun in each host, with its store in the first. ``arguments``: the script or module, and its own.

    ``fewest``: hosts that are enough; when others die, those that are left start again.
    """
    made = []
    for host in among:
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{among[0].address}:{PORT}"]
        rendezvous += ["--rdzv-conf", f"is_host={int(host is among[0])},{QUICK}", "--local-addr", host.address]
        nodes = f"{fewest or len(among)}:{len(among)}"
        command = ["torch.distributed.run", "--nnodes", nodes, "--nproc-per-node", str(nproc), *rendezvous]
        command += [] if fewest is None else ["--max-restarts", "3"]
        command += ["-m"] if arguments[0] == "-m" else []
        # After "--", or torchrun would take what it can for its own.
        script = arguments[arguments[0] == "-m" :]
        made.append(host.popen([sys.executable, "-P", "-m", *command, "--", *script], **more))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description="torchrun over several hosts, which are this machine's")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--gbps", type=float, default=1.0, help="of each host's card (%(default)s)")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="from card to card (%(default)s)")
    parser.add_argument("--loss", type=float, default=0.0, help="share of frames that are lost (%(default)s)")
    parser.add_argument("--nproc", type=int, default=1, help="ranks of a host (%(default)s)")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, help="as torchrun's: a script, or -m module, and its own"
    )
    chosen = parser.parse_args()
    with hosts(chosen.hosts, chosen.gbps, chosen.delay_ms / 1e3, chosen.loss) as among:
        codes = [process.wait() for process in torchrun(among, chosen.nproc, chosen.arguments)]
        for host in among:
            print(f"host{host.number} sent {host.sent():,} bytes")
    return max(codes)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--switch"]:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the maker's to act on
        (gbps, delay, loss, control), pairs = sys.argv[2:6], [pair.split(":") for pair in sys.argv[6:]]
        try:
            _switch(float(gbps), float(delay), float(loss), int(control), [int(tap) for tap, _ in pairs])
        finally:
            _remove([name for _, name in pairs])
    else:
        sys.exit(main())
