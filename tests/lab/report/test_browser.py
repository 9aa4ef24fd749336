"""The page in a real browser: it shows all parts, complains about nothing, and asks nobody for anything."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab.report.documents import Document
from trysquare.lab.data import load
from trysquare.lab.report import write_report
from trysquare.lab.report.page import _CONTENTS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update",
    "--disable-background-networking", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND",
    "--enable-logging=stderr",
]  # fmt: skip

pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="SKIPPED FOR WANT OF A BROWSER: the report was not opened; apt-get install chromium"
)


def opened(page, profile, *options):
    """The page after the browser has read it, what it wrote to its console, and the requests that the page made."""
    log = profile / "requests.json"
    given = [BROWSER, *OPTIONS, f"--user-data-dir={profile}", f"--log-net-log={log}", *options, page.as_uri()]
    done = subprocess.run(given, capture_output=True, text=True, timeout=60, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    events = [event.get("params", {}) for event in json.loads(log.read_text())["events"]]
    # The browser has requests of its own, which are not of an origin.
    asked = [event["url"] for event in events if event.get("initiator", "not an origin") != "not an origin"]
    return done.stdout, console, asked


def test_the_report_opens_without_complaint_or_request(run, tmp_path):
    path = write_report(run, load("digits", split="test"))
    text, console, asked = opened(path, Path(tmp_path), "--dump-dom")
    assert console == []
    assert asked == []
    shown = Document(text)
    assert [given["id"] for given in shown.of("section")] == list(_CONTENTS)
    assert len(shown.of("svg")) == 9
    assert len(shown.of("img")) == len(Document(path.read_text()).of("img"))


def test_complaints_and_requests_would_be_seen(tmp_path):
    path = tmp_path / "bad.html"
    path.write_text('<!doctype html><img src="http://127.0.0.1:9/x.png"><script>console.error("boom")</script>')
    _, console, asked = opened(path, tmp_path, "--dump-dom")
    assert "boom" in console[0]
    assert asked == ["http://127.0.0.1:9/x.png"]


@pytest.mark.parametrize(("scheme", "bright"), [(0, False), (1, True)])
def test_the_page_is_light_or_dark_as_the_reader_has_it(run, tmp_path, scheme, bright):
    image = pytest.importorskip("PIL.Image")
    target = tmp_path / "page.png"
    path = write_report(run)
    options = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=800,600", f"--screenshot={target}"]
    opened(path, tmp_path, *options)
    corner = image.open(target).convert("L").getpixel((3, 300))
    assert (corner > 200) if bright else (corner < 60)
