"""A page in a headless Chromium that a test acts in: points, clicks, types, and reads what came of it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from devtools import Browser, Page, chromium

_KEYS = {"Enter": 13, " ": 32, "ArrowDown": 40, "ArrowUp": 38, "Tab": 9}


class Tab:
    """One page. `log` are the messages of its console, those of its content policy included."""

    def __init__(self, browser: Browser) -> None:
        self._browser = browser
        self._page: Page | None = None

    @property
    def log(self) -> list[str]:
        return self._browser.complaints

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        assert self._page is not None
        return self._page.send(method, **params)

    def open(self, page: Path, width: int = 1280, height: int = 900, dark: bool = False) -> Tab:
        """Load a page from disk."""
        if self._page is None:
            self._page = self._browser.open("about:blank", width, dark)
            self.send("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", media="", features=scheme)
        self.send("Page.navigate", url=page.resolve().as_uri())
        self._page.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")
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
    with chromium(folder) as browser:
        yield Tab(browser)
