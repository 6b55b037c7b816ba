"""A headless Chromium, where this machine has one, driven over a pipe by its DevTools protocol: no library, no port."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-headless-shell", "google-chrome", "chromium-browser")
KEYS = {"ArrowRight": 39, "ArrowLeft": 37, "Escape": 27, "Enter": 13}


def found() -> str | None:
    """Its path; ``CHROMIUM`` in the environment names one that is nowhere on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. ``events``: what the browser said of it, in order."""

    def __init__(self, send: Any, receive: Any) -> None:
        self._send, self._receive, self._count = send, receive, 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        self._send(message | ({"sessionId": self._session} if self._session else {}))
        while True:
            got = self._receive()
            if got.get("id") == self._count:
                assert "error" not in got, (method, got["error"])
                return got["result"]
            self.events.append(got)

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def size(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def dark(self, on: bool) -> None:
        value = "dark" if on else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": value}])

    def open(self, path: Path) -> None:
        self.call("Page.navigate", url=path.resolve().as_uri())
        for _ in range(400):
            if self.ask("document.documentElement.dataset.ready ?? ''") == "yes":
                return
            if self.errors():
                break
        raise AssertionError(f"{path} did not come to be ready: {self.errors()}")

    def ask(self, expression: str) -> Any:
        """What the expression is, after the frame that is being drawn, as plain data."""
        text = f"new Promise(done => requestAnimationFrame(() => setTimeout(() => done({expression}))))"
        answer = self.call("Runtime.evaluate", expression=text, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def key(self, key: str) -> None:
        more = {"text": key} if len(key) == 1 else {"windowsVirtualKeyCode": KEYS[key]}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def hover(self, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, whole: bool = False) -> None:
        answer = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **(self._clip() if whole else {}))
        path.write_bytes(base64.b64decode(answer["data"]))

    def _clip(self) -> dict[str, Any]:
        width, height = self.ask("[innerWidth, document.documentElement.scrollHeight]")
        return {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}

    def errors(self) -> list[str]:
        """Exceptions of scripts, and what the console and the browser had to complain of."""
        said = [event["params"] for event in self.events if event.get("method") == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in self.events if event.get("method") == "Log.entryAdded"]
        return [json.dumps(one) for one in (*said, *logged)]

    def requests(self) -> list[str]:
        """Addresses that the page asked for."""
        sent = [event["params"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent]


@contextmanager
def browser() -> Iterator[Page]:
    path = found()
    assert path is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    folder = tempfile.mkdtemp()
    # The protocol's pipes are file descriptors 3 and 4 of the browser's.
    arguments = "--no-sandbox --disable-gpu --headless --no-first-run --remote-debugging-pipe"
    command = f'exec 3<&{to_browser[0]} 4>&{from_browser[1]}; exec "$0" {arguments} --user-data-dir={folder} "$@"'
    process = subprocess.Popen(
        ["bash", "-c", command, path], pass_fds=[to_browser[0], from_browser[1]], stderr=subprocess.DEVNULL
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    rest = b""

    def send(message: dict[str, Any]) -> None:
        os.write(to_browser[1], json.dumps(message).encode() + b"\0")

    def receive() -> dict[str, Any]:
        nonlocal rest
        while b"\0" not in rest:
            more = os.read(from_browser[0], 1 << 20)
            assert more, "the browser is gone"
            rest += more
        one, _, rest = rest.partition(b"\0")
        return json.loads(one)  # type: ignore[no-any-return]

    try:
        page = Page(send, receive)
        page.attach()
        yield page
    finally:
        process.terminate()
        process.wait()
        os.close(to_browser[1])
        os.close(from_browser[0])
        shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """``python -m tests.browser RUN/dump/report.html docs/report.png``: the picture that the README shows."""
    page, picture = map(Path, sys.argv[1:3])
    with browser() as opened:
        opened.size(1300, 940)
        opened.open(page)
        opened.picture(picture)


if __name__ == "__main__":
    main()
