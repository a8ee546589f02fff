"""Chromium driven over a pipe (its DevTools protocol): for pages that a server changes while they are open."""

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

_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--remote-debugging-pipe",
    # Every page is in front: a browser slows, draws not at all, or freezes what it believes nobody sees.
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
)
# Beside other runs everything takes longer, looking too: so looks are counted, which take 90 s on a machine at rest.
# A browser that starts, or draws without a graphics card, may need minutes for one answer; that it has ended is noticed
# at once.
_LOOKS = 1800
_NAVIGATED = "navigated"  # in the answer to a script that was running when the browser left the page
_LOOK_SECONDS = 0.05
_ANSWER_SECONDS = 600.0


class Browser:
    """One Chromium. `complaints` are errors, exceptions and what a page's policy blocked, of all its pages."""

    def __init__(self, process: subprocess.Popen[bytes], reading: int, writing: int) -> None:
        self._process, self._reading, self._writing = process, reading, writing
        self._buffer = b""
        self._number = 0
        self.complaints: list[str] = []

    def open(self, url: str, width: int = 1280, dark: bool = False) -> Page:
        """A page in a window of its own, of this width."""
        target = self.send("Target.createTarget", url="about:blank", newWindow=True)["targetId"]
        page = Page(self, self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"])
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.send("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[scheme])
        page.send("Page.navigate", url=url)
        return page

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """One command, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._writing, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        ends = time.monotonic() + _ANSWER_SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._reading], [], [], max(ends - time.monotonic(), 0))
            piece = os.read(self._reading, 1 << 16) if ready else b""
            assert piece, "Chromium has ended" if ready else "Chromium does not answer"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        facts = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(facts["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
            self.complaints.append(f"{facts['entry']['text']} {facts['entry'].get('url', '')}")


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **parameters)

    def value(self, expression: str) -> Any:
        """What a script gives on this page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        """The text that a reader sees there; empty where there is no such element."""
        return str(self.value(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''"))

    def wait_for(self, expression: str) -> Any:
        """Until a script gives something true, and what that is; what is not there yet is not true."""
        found = f"const found = ({expression}); return found instanceof Node ? true : found;"
        attempt = f"(() => {{ try {{ {found} }} catch {{ return false; }} }})()"
        for _ in range(_LOOKS):
            try:
                if answer := self.value(attempt):
                    return answer
            except AssertionError as error:
                if _NAVIGATED not in str(error):
                    raise
            time.sleep(_LOOK_SECONDS)
        raise AssertionError(f"never true: {expression}\n{self.text('body')}")

    def follow(self, element: str) -> None:
        """Click a link, given as a script. It answers before the browser leaves the page, which would break it off."""
        self.value(f"void setTimeout((link => () => link.click())({element}))")

    def choose(self, selector: str, value: str) -> None:
        """Choose an entry of a list, as a reader does."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.value(
            f"(list => {{ list.value = {json.dumps(value)}; list.dispatchEvent(new Event('change')); }})({found})"
        )

    def press(self, selector: str, key: str) -> None:
        """Press a key on an element."""
        event = f"new KeyboardEvent('keydown', {{key: {json.dumps(key)}, bubbles: true}})"
        self.value(f"document.querySelector({json.dumps(selector)}).dispatchEvent({event})")

    def picture(self, path: Path) -> None:
        """A screenshot of the whole page."""
        answer = self.send("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(answer["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Browser]:
    """A Chromium with a profile of its own in this folder. Skips where there is none."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("Chromium is not installed")
    to_browser, writing = os.pipe()
    reading, from_browser = os.pipe()
    # The browser reads commands from its file 3 and writes answers to its file 4.
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    process = subprocess.Popen(
        ["bash", "-c", script, "bash", program, *_OPTIONS, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=(to_browser, from_browser),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser)
    os.close(from_browser)
    try:
        yield Browser(process, reading, writing)
    finally:
        os.close(writing)  # it ends when its commands do
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(reading)
