"""The documentation site in Chromium: search, language switch, and what axe finds.

Run: pytest tests/docs/test_site_in_browser.py
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page

from tests.front.board.boards import chromium
from tests.needs import lacking

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(lacking("chromium")), reason=lacking("chromium") or "-"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of playwright's own process
]
AXE = Path(__file__).parents[1] / "front" / "board" / "axe" / "axe.min.js"
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
LINE = "Watchdog caught collective operation timeout"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with chromium() as made:
        yield made


def opened(browser: Browser, page: Path, **options: object) -> Page:
    """A page of the site, opened as a file."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    context.set_default_timeout(60_000)  # the machine may be busy
    tab = context.new_page()
    tab.goto(page.as_uri())
    return tab


def first_result(tab: Page) -> str:
    """The page that the search shows first."""
    result = tab.wait_for_selector(".md-search-result__item a")
    assert result is not None
    return (result.get_attribute("href") or "").partition("?")[0]


def test_the_site_searches_when_it_is_opened_as_a_file(browser: Browser, site: Path) -> None:
    """Without a server a page may not start the search's worker:
    docs-theme/javascripts/iframe-worker.js runs it in a frame.
    """
    tab = opened(browser, site / "index.html", viewport={"width": 390, "height": 844})
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((site / "reference" / "causes.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    tab.keyboard.press("/")
    tab.keyboard.type(LINE)
    assert first_result(tab).endswith("rank_stalled.html")
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
    tab.context.close()


def test_text_that_comes_without_a_key_is_searched(browser: Browser, site: Path) -> None:
    """As the mouse pastes it: an event `input`, and no `keyup`."""
    tab = opened(browser, site / "index.html")
    tab.get_by_role("textbox", name="Search").click()
    tab.keyboard.insert_text(LINE)
    assert first_result(tab).endswith("rank_stalled.html")
    assert not tab.locator(".md-search-result .md-tags").first.is_visible()
    tab.context.close()


def test_the_language_switch_stays_on_the_page(browser: Browser, site: Path) -> None:
    tab = opened(browser, site / "how-to" / "low-memory.html")
    for language, folder in (("zh", site / "zh"), ("en", site)):
        tab.get_by_role("button", name="language" if language == "zh" else "语言").hover()
        tab.locator(f"a.md-select__link[hreflang={language}]").click()
        tab.wait_for_url((folder / "how-to" / "low-memory.html").as_uri())
    tab.context.close()


@pytest.mark.parametrize("page", [
    "index.html", "how-to/low-memory.html", "reference/causes/cuda_oom.html", "reference/config.html", "zh/index.html",
    "zh/how-to/low-memory.html", "zh/reference/causes/cuda_oom.html",
])  # fmt: skip
def test_axe_finds_nothing_serious(browser: Browser, site: Path, page: str) -> None:
    for width, scheme in LOOKS[::3] if page.startswith("zh/") else LOOKS:
        size = {"width": width, "height": 900}
        tab = opened(browser, site / page, viewport=size, color_scheme=scheme, bypass_csp=True)
        tab.add_script_tag(path=AXE)
        found = tab.evaluate("axe.run(document, {resultTypes: ['violations']})")
        serious = [
            (one["id"], [node["html"][:200] for node in one["nodes"]][:3])
            for one in found["violations"]
            if one["impact"] in ("serious", "critical")
        ]
        assert serious == [], (width, scheme)
        assert len(found["passes"]) > 20
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), (width, scheme)
        shown = tab.evaluate("document.body.dataset.mdColorScheme")
        assert shown == {"light": "default", "dark": "slate"}[scheme]
        tab.context.close()
