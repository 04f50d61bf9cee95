"""
A headless Chromium, driven through a pipe: the Chrome DevTools Protocol, https://chromedevtools.github.io/devtools-protocol/.

Only what the tests of the site need: load a page at a width, run JavaScript in it, press keys.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, Self

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
"""Names under which systems have it."""

BYTES = 1 << 16
END = b"\0"


class Chromium:
    """
    One browser with one tab.

    Args:
        folder: An empty directory for its profile.
    """

    def __init__(self, folder: Path) -> None:
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise FileNotFoundError(f"none of {', '.join(PROGRAMS)} is installed")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        # The protocol's descriptors are 3 and 4: the shell puts them there. The pipes' own numbers may be 3 and 4 too,
        # so it gets copies with numbers that are not in the way; bash, because sh may know no number above 9.
        low_in, low_out = (fcntl.fcntl(fd, fcntl.F_DUPFD, 50) for fd in (theirs_in, theirs_out))
        options = (
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"),
            *("--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"),
            f"--user-data-dir={folder}",
        )
        launch = f'exec "$@" 3<&{low_in} 4>&{low_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", launch, "bash", program, *options],
            pass_fds=(low_in, low_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, low_in, low_out):
            os.close(fd)
        self._number = 0
        self._rest = b""
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None
        tab = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")
        self.call("Network.enable")
        self.search(on=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError, EOFError):
            self._session = None
            self.call("Browser.close")
        os.close(self._in)
        os.close(self._out)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    # -- the protocol --------------------------------------------------------------------------------------------------

    def call(self, method: str, **arguments: object) -> dict[str, Any]:
        """Call a method of the protocol, and wait for its result."""
        self._number += 1
        message: dict[str, object] = {"id": self._number, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + END)
        while True:
            answer = self._message()
            if answer.get("id") != self._number:
                self._events.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']['message']}")
            else:
                result: dict[str, Any] = answer["result"]
                return result

    def _message(self) -> dict[str, Any]:
        while END not in self._rest:
            more = os.read(self._in, BYTES)
            if not more:
                raise EOFError("Chromium has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(END)
        message: dict[str, Any] = json.loads(text)
        return message

    def _wait_for(self, event: str) -> None:
        while all(seen.get("method") != event for seen in self._events):
            self._events.append(self._message())

    # -- a reader ------------------------------------------------------------------------------------------------------

    def look(self, width: int, height: int = 900, *, scheme: Literal["light", "dark"] = "light") -> None:
        """Use a window of this many CSS pixels, as a phone or a desktop has them, and a colour scheme."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def scripts(self, *, on: bool) -> None:
        """Run the scripts of pages that are loaded from now on, or not."""
        self.call("Emulation.setScriptExecutionDisabled", value=not on)

    def search(self, *, on: bool) -> None:
        """Let pages that are loaded from now on load the index of the search, a quarter of their time, or not."""
        self.call("Network.setBlockedURLs", urls=[] if on else ["*/search/*", "*/workers/search.*"])

    def load(self, url: str) -> None:
        """Load a page, and wait until it is complete."""
        self._events.clear()
        self.call("Page.navigate", url="about:blank")
        self._wait_for("Page.loadEventFired")
        if url.startswith("http"):
            # The site keeps the colours that a reader has chosen, and takes those of the last page for chosen.
            origin = "/".join(url.split("/")[:3])
            self.call("Storage.clearDataForOrigin", origin=origin, storageTypes="local_storage")
        self._events.clear()
        self.call("Page.navigate", url=url)
        self._wait_for("Page.loadEventFired")

    def run(self, script: str) -> Any:  # noqa: ANN401 - whatever JavaScript gives
        """Evaluate an expression in the page; a promise is awaited."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(done["exceptionDetails"]["exception"].get("description"))
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key: Tab or Enter."""
        code, text = {"Tab": (9, ""), "Enter": (13, "\r")}[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **common)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)
