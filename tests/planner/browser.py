"""A headless Chromium for tests, spoken to over its debugging pipe: no port, no driver, no library.

OCTAVO_TEST_CHROMIUM names the program; else it is looked for by its usual names.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {
    "Tab": ("Tab", 9),
    "Right": ("ArrowRight", 39),
    "Left": ("ArrowLeft", 37),
    "Home": ("Home", 36),
    "End": ("End", 35),
    "Enter": ("Enter", 13),
}


def find_chromium() -> str | None:
    """The program, or None."""
    given = os.environ.get("OCTAVO_TEST_CHROMIUM")
    return given or next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page. Every request that it sends is in `requests`."""

    def __init__(self, program: str, profile: Path) -> None:
        to_browser, from_test = os.pipe()
        to_test, from_browser = os.pipe()
        command = [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--no-first-run", "--disable-background-networking", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={profile}", "about:blank"]

        def wire() -> None:
            # Chromium reads commands from descriptor 3 and answers on 4.
            read, write = os.dup(to_browser), os.dup(from_browser)
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            command,
            pass_fds=(3, 4, to_browser, from_browser),
            preexec_fn=wire,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._out = os.fdopen(from_test, "wb")
        self._in = os.fdopen(to_test, "rb")
        self._left = b""
        self._numbers = itertools.count(1)
        self._session: str | None = None
        self.requests: list[str] = []
        self.errors: list[str] = []

    def __enter__(self) -> Browser:
        pages = self.send("Target.getTargets")["targetInfos"]
        target = next(page["targetId"] for page in pages if page["type"] == "page")
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = None
        try:
            self.send("Browser.close")
        finally:
            self._out.close()
            self._in.close()
            self._process.wait(20)

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        self._out.write(json.dumps(message).encode() + b"\0")
        self._out.flush()
        while True:
            answer = self._next()
            self._notice(answer)
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                found: dict[str, Any] = answer["result"]
                return found

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._in.fileno(), 1 << 16)
            assert piece, "the browser ended"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _notice(self, message: dict[str, Any]) -> None:
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(message["params"]["exceptionDetails"]))

    def wait_for(self, method: str) -> None:
        while True:
            message = self._next()
            self._notice(message)
            if message.get("method") == method:
                return

    def open(self, path: Path) -> None:
        self.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.send("Page.navigate", url=path.as_uri())
        self.wait_for("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=True)

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript comes to."""
        done = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def press(self, key: str, times: int = 1) -> None:
        name, code = KEYS[key]
        for _ in range(times):
            for kind in ("rawKeyDown", "keyUp"):
                self.send(
                    "Input.dispatchKeyEvent",
                    type=kind,
                    key=name,
                    code=name,
                    windowsVirtualKeyCode=code,
                    nativeVirtualKeyCode=code,
                )
