"""Control a headless Chromium by the DevTools protocol over a pipe, without an extra package."""

import json
import os
import select
import subprocess
from pathlib import Path

SILENCE_SECONDS = 600  # a browser that sends nothing for this long counts as hung
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Browser:
    """One page in a browser process. `problems` holds exceptions, console errors and log entries.

    Args:
        executable: the path of Chromium.
        profile: an empty folder for the files of the browser.
    """

    def __init__(self, executable: str, profile: Path):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        # DevTools reads descriptor 3 and writes descriptor 4.
        redirect = f'exec "$@" 3<&{to_child} 4>&{from_child}'
        options = (*FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank")
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "browser", executable, *options],
            pass_fds=(to_child, from_child),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._received, self._last_id, self._session = b"", 0, None
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        os.close(self._out)  # the browser ends when this pipe is closed
        self._process.wait(timeout=SILENCE_SECONDS)
        os.close(self._in)

    def call(self, method: str, **params) -> dict:
        """Send a command of the protocol; return the result."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._read()).get("id") != self._last_id:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def open(self, page: Path | str, width: int, dark: bool = False) -> None:
        """Load a file or a URL in a window of this width in CSS pixels; wait until it is loaded."""
        scheme = "dark" if dark else "light"
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features)
        phone = width < 600
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": phone}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.wait_until_loaded()

    def wait_until_loaded(self) -> None:
        while (event := self._read()).get("method") != "Page.loadEventFired":
            self._note(event)

    def run(self, expression: str):
        """Return the value of a JavaScript expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key)

    def _read(self) -> dict:
        while b"\0" not in self._received:
            if not select.select([self._in], [], [], SILENCE_SECONDS)[0]:
                self._process.kill()
                raise RuntimeError(f"the browser has sent nothing for {SILENCE_SECONDS} seconds")
            chunk = os.read(self._in, 1 << 16)
            if not chunk:
                raise RuntimeError(f"the browser has ended with exit code {self._process.wait()}")
            self._received += chunk
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict) -> None:
        kind, params = event.get("method"), event.get("params", {})
        is_error = kind == "Runtime.consoleAPICalled" and params["type"] == "error"
        if is_error or kind in ("Runtime.exceptionThrown", "Log.entryAdded"):
            self.problems.append(json.dumps(params))
