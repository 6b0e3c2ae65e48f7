"""Takes docs/images/server.png, the server's page with an answer: python docs/drawings/server.py

It serves zoo:journeys and sends the page's own example in chromium. The window is as narrow as two columns allow, so
that the letters can be read on a phone.
"""

import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

OUTPUT = Path(__file__).parents[1] / "images" / "server.png"
PORT, WIDTH, SECONDS = 8739, 740, 120


def main() -> None:
    command = [sys.executable, "-m", "intbmoe.cli", "serve", "zoo:journeys", "--port", str(PORT)]
    server = subprocess.Popen(command)
    try:
        _wait_for(server)
        with sync_playwright() as running:
            browser = running.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            look = {"viewport": {"width": WIDTH, "height": 800}, "color_scheme": "light", "device_scale_factor": 1.5}
            _take(browser.new_context(**look).new_page())
            browser.close()
    finally:
        server.terminate()
        server.wait(60)


def _wait_for(server: subprocess.Popen) -> None:
    end = time.monotonic() + SECONDS
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health/ready", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"the server is not ready after {SECONDS} s (exit status {server.poll()})")


def _take(page: Page) -> None:
    page.goto(f"http://127.0.0.1:{PORT}/")
    page.get_by_role("button", name="Use the example").click()
    page.get_by_role("button", name="Ask", exact=True).click()
    page.wait_for_selector("ol.results li")
    page.get_by_text("Now", exact=True).click()  # folds this section to keep the picture low
    page.wait_for_selector(".token")
    page.screenshot(path=OUTPUT, full_page=True)


if __name__ == "__main__":
    main()
