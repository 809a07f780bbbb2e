"""Chromium, and its contexts closed after each test."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.front.board.boards import chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Debian's Chromium."""
    with chromium() as made:
        yield made


@pytest.fixture
def closed(browser: Browser) -> Iterator[None]:
    """No page of a test that is over asks its server beside the next."""
    yield
    for context in browser.contexts:
        context.close()
