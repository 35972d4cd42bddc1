"""A headless Chromium over its own pipe: opens files, acts like a user, and records whatever goes wrong."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

EXECUTABLE = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
# The browser reads commands from descriptor 3 and writes answers to 4.
_START = """import fcntl, os, sys
ends = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.dup2(ends[0], 3)
os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_TIMEOUT = 60.0
_KEYS = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Tab": 9}


class Browser:
    """One browser process with one page; the page's errors and requests are kept in ``errors`` and ``requests``."""

    def __init__(self, folder: Path) -> None:
        assert EXECUTABLE is not None
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                _START,
                str(to_child),
                str(from_child),
                EXECUTABLE,
                *_FLAGS,
                f"--user-data-dir={folder}",
                "about:blank",
            ],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._loaded = False
        targets = self._call("Target.getTargets")["targetInfos"]
        page = next(target for target in targets if target["type"] == "page")
        attached = self._call("Target.attachToTarget", targetId=page["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0
        )

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._write)
        os.close(self._read)

    def open(self, path: Path, *, width: int = 1100, height: int = 900, dark: bool = False) -> None:
        """Show a file from disk, until it is loaded and painted."""
        self.errors.clear()
        self.requests.clear()
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        self._call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + _TIMEOUT
        while not self._loaded:
            self._receive(deadline)
        self.settle()

    def settle(self) -> None:
        """Wait until the page has been laid out and painted."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, expression: str) -> Any:
        """The value of a script expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str) -> Any:
        """Run an expression until it is true."""
        deadline = time.monotonic() + _TIMEOUT
        while not (value := self.run(expression)):
            assert time.monotonic() < deadline, f"never true: {expression}"
            time.sleep(0.05)
        return value

    def text(self, selector: str) -> str:
        return str(self.run(f"(document.querySelector({json.dumps(selector)}) || {{}}).innerText || ''"))

    def _mouse(self, kind: str, x: float, y: float, **details: Any) -> None:
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **details)

    def hover(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y)

    def click(self, x: float, y: float) -> None:
        self._mouse("mousePressed", x, y, button="left", clickCount=1)
        self._mouse("mouseReleased", x, y, button="left", clickCount=1)

    def key(self, name: str) -> None:
        code = {"windowsVirtualKeyCode": _KEYS[name]}
        text = {"text": "\r"} if name == "Enter" else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", key=name, code=name, **code, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=name, code=name, **code)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def screenshot(self, path: Path, *, selector: str | None = None) -> Path:
        options: dict[str, Any] = {"captureBeyondViewport": True}
        box = self.run(
            f"(() => {{ const b = document.querySelector({json.dumps(selector or 'html')}).getBoundingClientRect();"
            "return [b.left + scrollX, b.top + scrollY, b.width, b.height] })()"
        )
        options["clip"] = dict(zip(("x", "y", "width", "height"), box, strict=True), scale=1)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **options)["data"]))
        return path

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT
        while True:
            answer = self._receive(deadline)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            chunk = os.read(self._read, 1 << 16)
            assert chunk, "the browser has gone"
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = dict(json.loads(line))
        self._note(message.get("method"), message.get("params", {}))
        return message

    def _note(self, method: str | None, found: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Runtime.exceptionThrown":
            details = found["exceptionDetails"]
            self.errors.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and found["type"] in ("error", "warning", "assert"):
            self.errors.append(" ".join(str(part.get("value", part.get("description"))) for part in found["args"]))
        elif method == "Log.entryAdded" and found["entry"]["level"] in ("error", "warning"):
            self.errors.append(str(found["entry"]["text"]))
        elif method == "Network.requestWillBeSent" and not found["request"]["url"].startswith("data:"):
            self.requests.append(str(found["request"]["url"]))
        elif method == "Page.javascriptDialogOpening":
            self.errors.append(f"dialog: {found['message']}")
