"""Pages in a real browser: Debian's ``chromium`` without a screen."""

import json
import os
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt install chromium")
WIDTHS = (1100, 390)  # of a desktop's window, and of a phone
FRAMES = """<!doctype html><meta charset="utf-8"><body>
{frames}
<script>
function seen(element) {{
  const box = element.getBoundingClientRect()
  return box.width >= 20 && box.height >= 20
}}
function look(frame) {{
  const page = frame.contentDocument, width = page.documentElement.clientWidth
  const scrolls = element => element.closest(".wide, pre, svg")
  const end = element => element.getBoundingClientRect().right
  const outside = [...page.body.querySelectorAll("*")].filter(one => !scrolls(one) && end(one) > width + 1)
  const labels = [...page.querySelectorAll(".tabs label")]
  const tabs = labels.map(label => {{
    label.click()
    const shown = [...page.querySelectorAll(".tabs .picture")].filter(seen)
    return [label.textContent, shown.length === 1 && shown[0].previousElementSibling === label]
  }})
  const drawn = one => one.querySelectorAll("path").length + one.querySelectorAll("text").length
  const drawings = [...page.querySelectorAll("svg")].filter(one => !one.closest(".tabs"))
  const pictures = drawings.map(one => seen(one) && drawn(one) > 9)
  const fetched = frame.contentWindow.performance.getEntriesByType("resource").map(one => one.name)
  return {{
    width, scroll: page.documentElement.scrollWidth, tabs, pictures,
    outside: outside.map(one => one.outerHTML.slice(0, 80)),
    fetched: fetched.filter(name => !name.startsWith("data:")),
  }}
}}
addEventListener("load", () => {{
  const found = [...document.querySelectorAll("iframe")].map(look)
  document.body.innerHTML = ""
  document.body.append("FOUND" + JSON.stringify(found) + "END")
}})
</script>"""


def dom_of(page: Path, folder: Path, *further: str) -> str:
    """The elements of a page after its scripts have run, with further options of the browser."""
    options = ["--headless", "--disable-gpu", "--dump-dom", "--virtual-time-budget=5000", "--window-size=1200,900"]
    options += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}", *further]
    options += ["--no-sandbox"] if os.geteuid() == 0 else []  # chromium refuses to start as root with it
    assert CHROMIUM is not None
    line = [CHROMIUM, *options, page.resolve().as_uri()]
    run = subprocess.run(line, capture_output=True, text=True, timeout=120, check=True)
    return unescape(run.stdout)


def look_at(page: Path, folder: Path) -> list[dict[str, Any]]:
    """What a browser shows of a page, at each of the widths.

    The page lies in frames of a page that asks for the places of its elements; nothing can be fetched.
    """
    frames = (
        f'<iframe src="{page.resolve().as_uri()}" style="width:{width}px;height:900px;border:0"></iframe>'
        for width in WIDTHS
    )
    around = folder / "frames.html"
    around.write_text(FRAMES.format(frames="".join(frames)), encoding="utf-8")
    text = dom_of(around, folder, "--allow-file-access-from-files")
    found = re.search(r"FOUND(.*)END", text, re.DOTALL)
    assert found is not None, text[-2000:]
    return json.loads(found[1])
