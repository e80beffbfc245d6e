"""A headless browser: Debian's chromium, driven through chromedriver."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGES = ("chromium", "chromium-driver", "fonts-dejavu-core")
# No sandbox, because tests run as root; no network, which a page must not need.
FLAGS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"),
    *("disable-background-networking", "disable-component-update"),
)


class Browser:
    """A browser window with one page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Open ``page`` in a window of ``width`` x ``height`` pixels; a phone's if width <= 500."""
        phone = width <= 500
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self.command("Emulation.setDeviceMetricsOverride", **metrics)
        self.command("Emulation.setTouchEmulationEnabled", enabled=phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.command("Emulation.setEmulatedMedia", features=[scheme])
        self.driver.get(page.as_uri())

    def command(self, name: str, **arguments: Any) -> Any:
        """Run a command of the DevTools protocol and return its result."""
        return self.driver.execute_cdp_cmd(name, arguments)

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and return what it returns."""
        return self.driver.execute_script(script, *arguments)

    def settle(self) -> None:
        """Wait until all changes are drawn."""
        script = "const done = arguments[0]; requestAnimationFrame(() => setTimeout(done, 0));"
        self.driver.execute_async_script(script)

    def find(self, selector: str) -> Any:
        """Return the element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def screenshot(self, file: Path) -> Any:
        """Write a picture of the whole page and return it as an array (height, width, 3)."""
        import numpy as np
        from PIL import Image

        size = self.command("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)
        file.write_bytes(base64.b64decode(shot["data"]))
        return np.asarray(Image.open(file).convert("RGB"))

    @property
    def complaints(self) -> list[str]:
        """Return the browser's log entries: errors, refused loads."""
        return [entry["message"] for entry in self.driver.get_log("browser")]


@pytest.fixture(scope="session")
def _driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    selenium = pytest.importorskip("selenium.webdriver")
    service = pytest.importorskip("selenium.webdriver.chrome.service")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        _install()
    options = selenium.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(f"--{flag}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = selenium.Chrome(options=options, service=service.Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def _install() -> None:
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        pytest.skip(f"no browser: apt-get install {' '.join(PACKAGES)}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    for command in (["apt-get", "update", "-qq"], install):
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=600
        )
        if result.returncode:
            pytest.skip(f"no browser, and {' '.join(command)} failed: {result.stderr[-300:]}")


@pytest.fixture
def browser(_driver: Any) -> Browser:
    """Return a browser with an empty page and an empty log."""
    _driver.get("about:blank")
    _driver.get_log("browser")
    return Browser(_driver)
