"""`fsdp-compiled rendezvous`: serves the store at which sites meet that come and go (`distributed.sites`)."""

import argparse
import signal
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist


def add_rendezvous_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, default=29400, help="where it listens, on all interfaces; 0: any free port")


def run_rendezvous(chosen: argparse.Namespace, _: Sequence[str]) -> int:
    if not 0 <= chosen.port < 2**16:
        raise ValueError(f"--port is {chosen.port}; expected 0 to 65535.")
    for one in (signal.SIGINT, signal.SIGTERM):  # before it says that it serves
        signal.signal(one, lambda *_: None)
        signal.pthread_sigmask(signal.SIG_BLOCK, [one])
    try:
        store = dist.TCPStore("0.0.0.0", chosen.port, is_master=True, wait_for_workers=False, timeout=timedelta(days=1))
    except dist.DistNetworkError as error:
        raise ValueError(f"port {chosen.port} cannot be served: {error}. Give another one.") from error
    print(f"sites meet at port {store.port} of this machine, until Ctrl-C", flush=True)
    signal.sigwait([signal.SIGINT, signal.SIGTERM])
    return 0
