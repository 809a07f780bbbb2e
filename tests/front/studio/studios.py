"""Starts `unisono studio`, and asks it as its page does."""

import contextlib
import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests import front_server

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TINY = "model: builtin:tiny\ndata:\n  train: rows.jsonl\n"


@dataclass
class Answer:
    """What the server said."""

    status: int
    data: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.data)

    @property
    def whats(self) -> list[str]:
        """The problems in it, in English."""
        return [one["what"]["en"] for one in self.json["problems"]]


@dataclass
class RunningStudio:
    """A server.

    Attributes:
        line: what it printed.
    """

    process: "subprocess.Popen[str]"
    root: Path
    line: dict[str, Any]

    @property
    def url(self) -> str:
        return str(self.line["url"])

    @property
    def port(self) -> int:
        return int(self.line["port"])

    @property
    def token(self) -> str:
        return self.url.partition("token=")[2]

    def send(self, method: str, path: str, body: bytes | None = None, /, **headers: str) -> Answer:
        """An answer to a request as it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        with contextlib.closing(connection):
            connection.request(method, path, body, sent)
            response = connection.getresponse()
            return Answer(response.status, response.read())

    def get(self, path: str) -> Any:
        answer = self.send("GET", path, Authorization=f"Bearer {self.token}")
        assert answer.status == 200, answer
        return answer.json

    def post(self, route: str, /, **body: Any) -> Answer:
        """An answer to a change by the page."""
        data = json.dumps(body).encode()
        return self.send(
            "POST",
            f"/api/studio/{route}",
            data,
            Authorization=f"Bearer {self.token}",
            Content_Type="application/json",
        )

    def row(self, name: str) -> dict[str, Any]:
        """What the list of runs says of one; empty: it is not there."""
        rows = self.get("/api/studio/runs")["runs"]
        return next((row for row in rows if row["name"] == name), {})

    def audit(self) -> str:
        """The lines of studio.log."""
        path = self.root / "studio.log"
        return path.read_text() if path.exists() else ""

    def end(self) -> int:
        """Ends it as a service manager does; the exit code."""
        if self.process.poll() is None:
            self.process.terminate()
        return self.process.wait(60)


@contextlib.contextmanager
def studio_of(root: Path, *options: str) -> Iterator[RunningStudio]:
    """A server for a directory, ended afterwards with the runs that it started."""
    words = [sys.executable, "-m", "unisono", "studio", "--json", "--no-open", "--root", str(root), *options]
    process = front_server.start(words, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        studio = RunningStudio(process, root, json.loads(process.stdout.readline()))
        try:
            yield studio
        finally:
            studio.end()


def opened(browser: "Browser", url: str, errors: list[str], **options: Any) -> "Page":
    """A page that is complete."""
    context = browser.new_context(viewport={"width": options.pop("width", 1280), "height": 900}, **options)
    context.set_default_timeout(120_000)  # the machine may be busy
    page = context.new_page()
    page.on("console", lambda one: errors.append(one.text) if one.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.wait_for_selector("[data-built]")
    return page


_TIMED = """(key) => {
  const yaml = document.getElementById("yaml"), times = window.times = [];
  document.getElementById(key).addEventListener("keydown", () => {
    const began = performance.now(), text = yaml.value;
    const look = () => yaml.value === text ? requestAnimationFrame(look) : times.push(performance.now() - began);
    requestAnimationFrame(look);
  });
}"""


def typed_ms(page: "Page", field: str, text: str) -> list[float]:
    """Milliseconds from each key that is typed into a field to the frame with its YAML."""
    page.locator(f"[id='{field}']").focus()
    page.evaluate(_TIMED, field)
    for count, key in enumerate(text, start=1):
        page.keyboard.press(key)
        page.wait_for_function("(count) => window.times.length === count", arg=count)
    times: list[float] = page.evaluate("window.times")
    return times


def first_paint_ms(page: "Page") -> float:
    """Milliseconds from the beginning of the navigation to the first text on the page."""
    entry = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(page.evaluate(entry))


def write_rows(folder: Path, count: int = 60) -> Path:
    """Rows of prompts and answers."""
    path = folder / "rows.jsonl"
    rows = [{"prompt": f"say {n}", "completion": f"{n} it is"} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def steps_of(root: Path, name: str) -> list[int]:
    """The steps in a run's metrics."""
    path = root / "runs" / name / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["step"] for line in lines if '"loss"' in line]


def until(condition: Callable[[], Any], *, limit_s: float = 180.0) -> Any:
    """Waits for an event, with a limit; what it gave."""
    began = time.monotonic()
    while not (value := condition()):
        assert time.monotonic() - began < limit_s, "it never happened"
        time.sleep(0.1)
    return value
