"""The built site in Chromium: `mkdocs build --strict`, then `pytest tests/site/check_site.py`.

Not collected by itself (its name does not begin with `test_`): it needs ./site, Playwright, and Chromium or Chrome.
"""

import functools
import http.server
import shutil
import threading
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

SITE = Path(__file__).resolve().parents[2] / "site"
FILES = [path for path in SITE.rglob("index.html") if 'http-equiv="refresh"' not in path.read_text()]  # not moved
PAGES = sorted(path.parent.relative_to(SITE).as_posix() for path in FILES)
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
BROKEN = "[...document.images].filter(i => !(i.complete && i.naturalWidth)).map(i => i.src)"
# What sticks out of the window, and does not lie in something that scrolls or hides it.
WIDER = """
[...document.querySelectorAll('.md-main *, .md-header *, .md-footer *')].filter(e => {
  if (e.getBoundingClientRect().right <= document.documentElement.clientWidth + 1) return false;
  for (let p = e.parentElement; p; p = p.parentElement)
    if (p.parentElement && p !== document.body && getComputedStyle(p).overflowX !== 'visible') return false;
  return getComputedStyle(e).position !== 'fixed' && e.getClientRects().length > 0;
}).map(e => e.outerHTML.slice(0, 120))
"""
# Code and tables that only scrolling shows whole.
CUT = """
[...document.querySelectorAll('.md-content pre > code, .md-typeset__scrollwrap')]
  .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText.slice(0, 200))
"""
# Each line of each paragraph, as the browser breaks them.
LINES = """
[...document.querySelectorAll('.md-content__inner > p')].flatMap(p => {
  const lines = [], range = document.createRange(), walker = document.createTreeWalker(p, NodeFilter.SHOW_TEXT);
  let bottom = null;
  for (let node = walker.nextNode(); node; node = walker.nextNode())
    for (let i = 0; i < node.length; i++) {
      range.setStart(node, i);
      range.setEnd(node, i + 1);
      const box = range.getBoundingClientRect();
      if (!box.width) continue;
      if (bottom === null || box.top > bottom - 4) lines.push('');
      if (bottom === null || box.bottom > bottom) bottom = box.bottom;
      lines[lines.length - 1] += node.data[i];
    }
  return lines;
})
"""


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def served():
    """A browser, and the address of the site."""
    handler = functools.partial(Quiet, directory=SITE)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, sync_playwright() as playwright:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser, f"http://127.0.0.1:{server.server_port}/"
        browser.close()
        server.shutdown()


@pytest.fixture(params=[1280, 390], ids="{}px".format)
def page(request, served):
    """A page that must end without an error on its console, a failed request, or one to another server."""
    (browser, url), errors = served, []
    page = browser.new_page(viewport={"width": request.param, "height": 844}, base_url=url)
    page.set_default_timeout(10_000)  # milliseconds
    page.on("console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("requestfailed", lambda failed: errors.append(failed.url))
    page.on("response", lambda answer: errors.append(f"{answer.status} {answer.url}") if answer.status >= 400 else None)
    own = (url, "data:", "blob:")
    page.on("request", lambda asked: None if asked.url.startswith(own) else errors.append(asked.url))
    yield page
    assert errors == []
    page.close()


def test_the_navigation_leads_to_every_page(page):
    page.goto("quick-start/")
    links = page.eval_on_selector_all(".md-sidebar--primary a[href]", "all => all.map(a => new URL(a.href).pathname)")
    assert {link.strip("/") or "." for link in links} == set(PAGES)


@pytest.mark.parametrize("path", PAGES)
def test_a_page_has_its_images_and_nothing_sticks_out(path, page):
    page.goto("" if path == "." else path + "/")
    assert page.evaluate(BROKEN) == []
    assert page.evaluate(WIDER) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= page.viewport_size["width"]
    if page.viewport_size["width"] == 1280 and not path.startswith("api"):
        assert page.evaluate(CUT) == []


def test_the_home_page_says_what_it_is_and_how_beside_its_navigation_in_lines_of_90_characters(page):
    page.goto("")
    for first in (page.get_by_text("without touching the model"), page.get_by_text("jamp.autocast").first):
        seen = first.bounding_box()
        assert seen["y"] + seen["height"] < page.viewport_size["height"]
    if page.viewport_size["width"] == 1280:
        assert page.locator(".md-sidebar--primary").bounding_box()["x"] >= 0
    lines = [" ".join(line.split()) for line in page.evaluate(LINES)]
    assert max(map(len, lines)) <= 90, max(lines, key=len)


@pytest.mark.parametrize(("scheme", "background"), [("light", "rgb(255, 255, 255)"), ("dark", "rgb(30, 33, 41)")])
def test_light_and_dark_follow_the_reader(scheme, background, page):
    page.emulate_media(color_scheme=scheme)
    page.goto("")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background


@pytest.mark.parametrize("words", ["GradScaler", "overflow", "fp8"])
def test_search_finds(words, page):
    page.goto("")
    if page.viewport_size["width"] < 960:
        page.click("label[for=__search].md-header__button")
    page.locator("input.md-search__input").press_sequentially(words)
    page.locator(".md-search-result__item mark", has_text=words).first.wait_for()
    page.locator(".md-search-result__item a").first.click()
    page.wait_for_url("**/?h=*")
    assert page.evaluate("location.pathname").strip("/") in PAGES
