"""A real browser, headless, for looking at a report: Chromium through selenium and chromedriver."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SIZE = (1400, 1000)


@contextmanager
def open_report(path: Path, *, fragment: str = "", size: tuple[int, int] = SIZE) -> Iterator[Any]:
    """The driver of a browser that has opened `path`; skips without a browser, which under CI is a failure."""
    browser, driver = find_browser()
    from selenium.webdriver import Chrome, ChromeOptions, ChromeService

    options = ChromeOptions()
    options.binary_location = browser
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
    for flag in (*flags, f"--window-size={size[0]},{size[1]}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    page = Chrome(options=options, service=ChromeService(executable_path=driver))
    try:
        page.get(path.resolve().as_uri() + (f"#{fragment}" if fragment else ""))
        yield page
    finally:
        page.quit()


def find_browser() -> tuple[str, str]:
    """Where Chromium and its driver are."""
    browser = next(filter(None, map(shutil.which, CHROMIUM)), None)
    driver = shutil.which("chromedriver")
    try:
        import selenium  # noqa: F401
    except ImportError:
        _give_up("the package selenium is not installed: pip install 'quant-probe[test]'")
    if browser is None or driver is None:
        _give_up("Chromium or its driver is not installed: apt-get install chromium chromium-driver")
    return str(browser), str(driver)


def _give_up(why: str) -> None:
    """In CI a browser that is missing hides what this checks, so that is an error there."""
    (pytest.fail if os.environ.get("CI") else pytest.skip)(f"no browser to open the report in: {why}")
