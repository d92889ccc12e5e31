from pathlib import Path

from browser import dom_of, needs_chromium
from pages import DOCS

SHIM = DOCS / "javascripts" / "iframe-worker.js"
PAGE = """<!doctype html><body><script src="shim.js"></script><script>
const worker = new Worker("echo.js")
worker.addEventListener("message", event => document.body.append("GOT" + event.data + "END"))
worker.postMessage("a question")
</script>"""
ECHO = """
addEventListener("message", event => importScripts("answer.js").then(() => postMessage(answer + " to " + event.data)))
"""


@needs_chromium
def test_the_search_has_its_worker_on_pages_from_the_disk(tmp_path: Path) -> None:
    """Browsers start none there: a frame answers in its place, with the scripts that it imports."""
    (tmp_path / "shim.js").write_text(SHIM.read_text(encoding="utf-8"))
    (tmp_path / "echo.js").write_text(ECHO)
    (tmp_path / "answer.js").write_text('var answer = "an answer"')
    (tmp_path / "page.html").write_text(PAGE)
    text = dom_of(tmp_path / "page.html", tmp_path).split("</script>")[-1]
    assert "GOTan answer to a questionEND" in text
