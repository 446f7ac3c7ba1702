"""The built website in a real browser: `make site-check`.

Every page: loads without an error in the console and without another host; its formulas are rendered; its links and
anchors lead somewhere; figures have texts, headings are in order; no scrolling sideways at the size of a laptop and of
a phone; axe-core finds nothing serious, in the light and in the dark; it weighs at most 1.5 MB, images included, as a
server sends it. Then what a reader does: searches, walks with Next and Previous, opens folds, plays with the drawings.
"""

import argparse
import functools
import gzip
import http.server
import os
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urljoin, urlparse

from bs4 import BeautifulSoup
from playwright.sync_api import Page, sync_playwright

BUILD = Path(__file__).resolve().parents[1] / "build"
AXE = BUILD / "site-npm" / "node_modules" / "axe-core" / "axe.min.js"
LAPTOP, PHONE = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
LAPTOPS = (1280, 1366, 1440)  # the contents of the page have a column from 1312 pixels on
LIMIT = 1_500_000  # bytes of a page with all that it loads, scripts and fonts of every page apart
SEARCHES = {  # what is searched for, and what has to come first
    "online softmax": "lectures/00_", "swizzle": "lectures/08_", "p11_flash": "lectures/11_",
    "cp.async": "lectures/08_", "logsumexp": "lectures/00_",
}  # fmt: skip
WHOLE = ("contributing.html", "lectures/03_minimal_triton_kernel.html", "exercises/08_pipelines_and_banks.html")
SIDEWAYS = """() => Math.max(...[document.scrollingElement, document.querySelector('.content')]
    .map(box => box.scrollWidth - box.clientWidth))"""
CUT_CODE = """() => [...document.querySelectorAll('div.cell_input pre')]
    .filter(code => code.scrollWidth > code.clientWidth).length"""
FORMULAS = """() => [document.querySelectorAll('.math').length,
    document.querySelectorAll('.math mjx-container').length, document.querySelectorAll('mjx-merror').length]"""
# Code and formulas look alike on every page, and have ten thousand parts: axe sees them only where `whole` says so.
SERIOUS = """async (whole) => {
    if (!whole) {
        document.querySelectorAll('pre').forEach(code => { code.textContent = code.textContent; });
        document.querySelectorAll('mjx-container').forEach(formula => formula.replaceChildren());
    }
    return (await axe.run({resultTypes: ['violations']})).violations
        .filter(v => ['serious', 'critical'].includes(v.impact))
        .map(v => `${v.id}: ${v.nodes.length} × ${v.nodes[0].target} ${v.nodes[0].failureSummary}`);
}"""


class Parsed:
    """What a page links to, loads and calls its parts."""

    def __init__(self, text: str):
        page = BeautifulSoup(text, "html.parser")  # Furo brings it
        self.links = [tag["href"] for tag in page.select("a[href]")]
        self.loads = [tag["src"] for tag in page.select("img[src], script[src], iframe[src]")]
        self.loads += [tag["href"] for tag in page.select("link[rel~=stylesheet], link[rel~=icon], link[rel~=preload]")]
        self.ids = {tag[name] for name in ("id", "name") for tag in page.select(f"[{name}]")}
        self.headings = [int(tag.name[1]) for tag in page.select("h1, h2, h3, h4, h5, h6")]
        self.without_text = [tag.get("src", "") for tag in page.select("img") if len(tag.get("alt", "")) < 15]
        self.metas = {tag.get("property") or tag.get("name", "") for tag in page.select("meta[content]")}
        self.metas |= {"canonical" for _ in page.select("link[rel~=canonical]")}


def static(site: Path, pages: list[str]) -> list[str]:
    """What is wrong with the files themselves, a sentence each."""
    wrong = []
    parsed = {name: Parsed((site / name).read_text(encoding="utf-8")) for name in pages}
    for name, page in parsed.items():
        for link in page.links:
            url = urlparse(link)
            if url.scheme or url.netloc:
                continue
            there = unquote(urljoin(name, url.path)) if url.path else name
            if not (site / there.lstrip("/")).is_file():
                wrong.append(f"{name}: {link} leads nowhere")
            elif url.fragment and there in parsed and unquote(url.fragment) not in parsed[there].ids:
                wrong.append(f"{name}: {link} has no such anchor")
        wrong += [f"{name}: {load} is of another host" for load in page.loads if urlparse(load).netloc]
        wrong += [f"{name}: the figure {figure} has no text" for figure in page.without_text]
        steps = list(zip([0, *page.headings], page.headings, strict=False))
        wrong += [f"{name}: a heading {b} follows a heading {a}" for a, b in steps if b > a + 1]
        if name not in ("search.html", "404.html"):
            missing = {"og:title", "og:image", "og:description", "description", "canonical"} - page.metas
            wrong += [f"{name}: no {meta}" for meta in sorted(missing) if not name.startswith("folds/")]
    return wrong


def weight(site: Path, name: str) -> int:
    """Bytes of a page and its images, text packed as a server packs it."""
    page = Parsed((site / name).read_text(encoding="utf-8"))
    loaded = {site / unquote(urljoin(name, load)) for load in page.loads if load.endswith((".png", ".svg"))}
    files = {site / name, *loaded}
    return sum(len(file.read_bytes() if file.suffix == ".png" else gzip.compress(file.read_bytes())) for file in files)


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves the site as GitHub Pages does: an address that is not there gets 404.html."""

    prefix = urlparse(os.environ.get("SITE_URL", "")).path.rstrip("/")  # 404.html has it in its links
    extensions_map = {**http.server.SimpleHTTPRequestHandler.extensions_map, ".js": "text/javascript"}

    def log_message(self, *_: object) -> None:
        pass

    def translate_path(self, path: str) -> str:
        return super().translate_path(path.removeprefix(self.prefix))

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        body = (Path(self.directory) / "404.html").read_bytes()
        self.send_response(code)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(body)


class Reader:
    """A browser's page that notes what goes wrong."""

    def __init__(self, page: Page, base: str):
        self.page, self.base, self.wrong = page, base, []
        page.on("console", lambda said: self.note(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: self.note(str(error)))
        page.on(
            "request", lambda asked: None if asked.url.startswith((base, "data:")) else self.note(f"asks {asked.url}")
        )

    def note(self, what: str) -> None:
        self.wrong.append(f"{self.page.url.removeprefix(self.base)}: {what}")

    def open(self, name: str, *, size: dict[str, int] = LAPTOP, dark: bool = False) -> None:
        self.page.set_viewport_size(size)
        self.page.emulate_media(color_scheme="dark" if dark else "light")
        self.page.goto(self.base + name, wait_until="load")
        self.page.evaluate("() => window.MathJax?.startup?.promise")

    def every_page(self, names: list[str]) -> None:
        for name in names:
            for size, dark in ((LAPTOP, False), (PHONE, True)):
                self.open(name, size=size, dark=dark)
                if (wide := self.page.evaluate(SIDEWAYS)) > 0:
                    self.note(f"{wide} pixels too wide at {size['width']}")
                for width in LAPTOPS if size == LAPTOP else ():
                    self.page.set_viewport_size(LAPTOP | {"width": width})
                    if cut := self.page.evaluate(CUT_CODE):
                        self.note(f"{cut} cells have code wider than the page at {width}")
                there, rendered, errors = self.page.evaluate(FORMULAS)
                if there != rendered or errors:
                    self.note(f"{rendered} of {there} formulas are rendered, {errors} with an error")
                if not dark or name in WHOLE or "/" not in name:
                    self.page.add_script_tag(path=AXE)
                    for found in self.page.evaluate(SERIOUS, name in WHOLE):
                        self.note(f"axe ({'dark' if dark else 'light'}): {found[:600]}")
            print(f"  {name}", flush=True)

    def searches(self) -> None:
        for words, first in SEARCHES.items():
            self.open(f"search.html?q={words}")
            link = self.page.locator("#search-results ul.search li a").first
            link.wait_for()
            found = (link.get_attribute("href") or "").partition("?")[0]
            if not found.startswith(first):
                self.note(f"a search for “{words}” finds {found} first, not {first}")

    def walk(self, course: list[str]) -> None:
        """Next from the first page passes all of the course in order; Previous leads all the way back."""
        for way, wanted in (("next", course), ("prev", course[::-1])):
            self.open(wanted[0])
            for name in wanted[1:]:
                for _ in range(4):  # pages between the lectures: setting up, drawings
                    self.page.locator(f"a.{way}-page").click()
                    self.page.wait_for_load_state()
                    here = self.page.url.removeprefix(self.base)
                    if here in wanted or here == "":
                        break
                if here != name:
                    self.note(f"the {way} page is not {name}")
                    self.open(name)

    def folds(self, lecture: str, exercises: str) -> None:
        self.open(lecture)
        fold = self.page.locator("details.later").first
        fold.locator("summary").click()
        fold.locator("pre").first.wait_for(timeout=10_000)
        if fold.locator(":scope > a").count():
            self.note("a fold was opened, and is not loaded")
        self.open(exercises)
        for kind in ("details.hint", "details.hide"):
            for place in range(self.page.locator(kind).count()):
                found = self.page.locator(kind).nth(place)
                found.locator("summary").first.click()
                if not found.locator("p:not(.admonition-title), pre").first.is_visible():
                    self.note(f"{kind} {place} does not open")

    def drawings(self) -> None:
        changes = {
            "softmax": ("scores", "3, 1, 9, -inf, 2, 2, 2, 50"), "fragments": ("operand", "C"),
            "banks": ("order", "XOR swizzle"), "causal": ("N", "64"), "ring": ("order", "zigzag"),
        }  # fmt: skip
        self.open("drawings.html")
        for name, (field, value) in changes.items():
            place = self.page.locator(f"[data-drawing={name}]")
            place.locator("svg").wait_for()
            before = place.inner_html()
            entry = place.locator(f"[name={field}]")
            entry.select_option(value) if entry.evaluate("e => e.tagName") == "SELECT" else entry.fill(value)
            if place.inner_html() == before:
                self.note(f"the drawing {name} does not answer to {field} = {value}")
        place = self.page.locator("[data-drawing=causal]")
        place.locator("[name=N]").fill("0")
        if "whole number" not in place.inner_text():
            self.note("the drawing causal does not say what is wrong with 0 keys")
        place.locator("[name=N]").fill("40")

    def missing(self) -> None:
        there = len(self.wrong)
        self.open("lectures/08_banks_of_old.html")
        self.wrong = [w for w in self.wrong[:there] + self.wrong[there:] if "404 (" not in w]
        self.page.locator(".find button").click()
        self.page.locator("#search-results ul.search li a, #search-results p").first.wait_for()
        if "q=banks+of+old" not in self.page.url:
            self.note("the page for what is missing does not search for its words")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="of the pages, those whose name contains this text")
    options = parser.parse_args()
    browser = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if not browser:
        print("no chromium here; install one (apt-get install chromium), or name it in CHROMIUM.")
        return 1
    site = BUILD / "site"
    every = sorted(str(path.relative_to(site)) for path in site.rglob("*.html") if "_static" not in path.parts)
    pages = [name for name in every if not name.startswith(("folds/", "genindex"))]
    wrong = static(site, [name for name in every if name != "404.html"])  # 404 has the addresses of SITE_URL
    weights = sorted(((weight(site, name), name) for name in pages), reverse=True)
    print("heaviest pages, in kB:", ", ".join(f"{name} {bytes_ / 1000:.0f}" for bytes_, name in weights[:5]))
    wrong += [f"{name}: {bytes_} bytes, more than {LIMIT}" for bytes_, name in weights if bytes_ > LIMIT]
    wrong += [f"{name}: {(site / name).stat().st_size} bytes" for name in pages if (site / name).stat().st_size > LIMIT]
    lectures = [name for name in pages if name.startswith("lectures/")]
    course = ["index.html", *(name for lecture in lectures for name in (lecture, f"exercises/{lecture[9:]}"))]

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page()
        page.set_default_timeout(60_000)
        reader = Reader(page, f"http://127.0.0.1:{server.server_port}{Quiet.prefix}/")
        reader.every_page([name for name in pages if not options.only or options.only in name])
        if not options.only:
            reader.searches()
            reader.walk(course)
            reader.folds(next(x for x in lectures if 'class="later"' in (site / x).read_text()), course[-1])
            reader.drawings()
            reader.missing()
        chromium.close()
    server.shutdown()
    wrong += dict.fromkeys(reader.wrong)
    print("\n".join(wrong) or f"{len(pages)} pages are as they should be")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
