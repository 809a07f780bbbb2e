"""Takes the pictures of docs/how-to/board.md: the page of a made run in both colour schemes, in
Chromium.

python scripts/board_pictures.py        writes docs/how-to/pictures/board-*.png
"""

import contextlib
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from playwright.sync_api import Browser  # noqa: E402

from tests.front.board.boards import chromium  # noqa: E402
from tests.front.board.made_runs import make_run  # noqa: E402
from unisono.front.board.page import runs_file  # noqa: E402
from unisono.front.board.regions import REGIONS, ROLLOUTS  # noqa: E402

FOLDER = ROOT / "docs" / "how-to" / "pictures"


def take_pictures(browser: Browser, folder: Path) -> dict[str, bytes]:
    """Each picture by its file name.

    Raises:
        AssertionError: if a region is not on the page.
    """
    with contextlib.chdir(folder):  # paths on the page are as they were given
        return _take_all(browser)


def _take_all(browser: Browser) -> dict[str, bytes]:
    stalled = make_run(Path("runs/demo"), steps=70, total=120, ranks=8, outcome="stalled")
    others = [
        make_run(Path("runs/sweep") / f"lr-{lr}", steps=200, total=200, seed=seed, lr=lr)
        for seed, lr in enumerate((1e-4, 2e-4, 4e-4))
    ]
    found = {}
    for name, runs, language, scheme, height in (
        ("board-light.png", [stalled], "en", "light", 1900), ("board-dark.png", [stalled], "zh", "dark", 1900), ("board-runs.png", others, "en", "light", 1300),
    ):  # fmt: skip
        found[name] = _picture(browser, runs, language=language, scheme=scheme, height=height)
    answers = make_run(Path("runs/grpo"), steps=24, total=24, rollouts=24)
    found["board-answers.png"] = _picture(
        browser, [answers], language="en", scheme="light", height=1900, region=ROLLOUTS
    )
    return found


def _picture(
    browser: Browser, runs: list[Path], *, language: str, scheme: Any, height: int, region: str | None = None
) -> bytes:
    """Of the top of the page, or of one region."""
    out = Path("page.html").absolute()
    out.write_text(runs_file(runs, key=b"")[1])
    context = browser.new_context(
        color_scheme=scheme, viewport={"width": 1280, "height": height}, timezone_id="UTC"
    )
    page = context.new_page()
    page.goto(f"{out.as_uri()}?lang={language}")
    page.wait_for_selector("[data-painted]")
    page.wait_for_timeout(300)
    for name in REGIONS:
        section = page.locator(f"[data-region={name}]")
        assert section.count() == 1, f"the region {name} is gone"
        if name == ROLLOUTS and region != ROLLOUTS:
            continue
        assert section.locator("h2").inner_text(), f"the region {name} has no heading"
        assert section.locator(".body").inner_text(), f"the region {name} is empty"
    picture = page.locator(f"[data-region={region}]").screenshot() if region else page.screenshot()
    context.close()
    return picture


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with chromium() as browser, tempfile.TemporaryDirectory() as folder:
        for name, data in take_pictures(browser, Path(folder)).items():
            (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
