"""Starts `unisono board`, and asks it as a browser does."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import front_server
from tests.needs import program

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync",
    # Each window would load two pages of Chromium's own, for its address bar: half of what a page
    # of a test costs.
    "--disable-features=WebUIOmniboxPopup,WebUIOmniboxAimPopup",
)  # fmt: skip
CHROMIUM = program("chromium") or "chromium"


@contextlib.contextmanager
def chromium() -> "Iterator[Browser]":
    """Debian's Chromium, without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield browser
        browser.close()


@dataclass
class RunningBoard:
    """A server, and the cookie for it once it was asked for.

    Attributes:
        line: what it printed.
    """

    process: "subprocess.Popen[str]"
    line: dict[str, Any]
    cookie: str = field(default="", init=False)

    @property
    def url(self) -> str:
        return str(self.line["url"])

    @property
    def port(self) -> int:
        return int(self.line["port"])

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    def ask(
        self, path: str, *, method: str = "GET", cookie: bool = True, **headers: str
    ) -> http.client.HTTPResponse:
        """An answer, read completely; its text is in `.read_text`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if cookie and not self.cookie:
            self.cookie = "-"
            first = self.ask(f"/?token={self.token}", cookie=False)
            self.cookie = (first.getheader("Set-Cookie") or "").partition(";")[0]
        if cookie:
            sent["Cookie"] = self.cookie
        with contextlib.closing(connection):
            connection.request(method, path, headers=sent)
            response = connection.getresponse()
            response.text = response.read().decode()  # type: ignore[attr-defined]
        return response

    def json(self, path: str) -> Any:
        """A JSON answer."""
        answer = self.ask(path)
        assert answer.status == 200, answer.status
        return json.loads(answer.text)  # type: ignore[attr-defined]

    def end(self) -> int:
        """Ends it as Ctrl-C does, if it still runs; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(120)


@contextlib.contextmanager
def board_of(*runs: Path, options: tuple[str, ...] = ()) -> Iterator[RunningBoard]:
    """A server for some runs, ended afterwards."""
    words = [sys.executable, "-m", "unisono", "board", "--json", *options, *map(str, runs)]
    process = front_server.start(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        try:
            yield RunningBoard(process, json.loads(process.stdout.readline()))
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait(120)
