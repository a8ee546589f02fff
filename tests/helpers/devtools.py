"""A page in a headless Chromium that a test acts in: points, clicks, types, and reads what came of it.

It speaks the DevTools protocol through a pipe: no port, no further package.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_SECONDS = 60
_KEYS = {"Enter": 13, " ": 32, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}


class Tab:
    """One page. `log` are the messages of its console, those of its content policy included."""

    def __init__(self, ask: int, answers: int) -> None:
        self._ask, self._answers = ask, answers
        self._number, self._rest, self._session = 0, b"", ""
        self.log: list[str] = []

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._ask, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            if answer.get("method") in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.log.append(json.dumps(answer["params"]))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            self._rest += os.read(self._answers, 1 << 16)
        text, self._rest = self._rest.split(b"\0", 1)
        answer: dict[str, Any] = json.loads(text)
        return answer

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """Load a page from disk."""
        if not self._session:
            target = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
            self.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=scheme)
        self.send("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + _SECONDS
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < end
            time.sleep(0.05)
        return self

    def resize(self, width: int, height: int) -> None:
        """Another window."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)

    def run(self, script: str) -> Any:
        """The value of an expression within the page; a promise is awaited."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """What a reader sees of the first such element."""
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def point(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, x: float, y: float) -> None:
        """Press and release the main button."""
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click_on(self, selector: str) -> None:
        """Scroll to the first such element and click into its middle."""
        middle = f"""(() => {{ const e = document.querySelector({json.dumps(selector)});
            e.scrollIntoView({{block: "center", behavior: "instant"}});
            const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]; }})()"""
        self.click(*self.run(middle))

    def press(self, key: str) -> None:
        """One key."""
        about = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key in ("Enter", " ") else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **about)

    def type(self, text: str) -> None:
        """Into what has the focus."""
        self.send("Input.insertText", text=text)

    def picture(self, path: Path, whole: bool = False) -> None:
        """A screenshot, of the whole page if wanted."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def tab(folder: Path) -> Iterator[Tab]:
    """A browser with one page, closed at the end. Skips where there is no browser."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    (read_ask, ask), (answers, write_answers) = os.pipe(), os.pipe()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"]
    profile = f"--user-data-dir={folder / 'profile'}"
    # The browser reads commands from its file 3 and answers into its file 4.
    command = (
        f"exec {chromium} {' '.join(options)} --remote-debugging-pipe '{profile}' 3<&{read_ask} 4>&{write_answers}"
    )
    process = subprocess.Popen(
        ["bash", "-c", command],
        pass_fds=(read_ask, write_answers),
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    os.close(read_ask)
    os.close(write_answers)
    try:
        yield Tab(ask, answers)
    finally:
        process.terminate()
        process.wait(timeout=30)
        os.close(ask)
        os.close(answers)
