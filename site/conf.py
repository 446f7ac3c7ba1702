"""How Sphinx builds the website from what stage.py has staged. SITE_URL is where it will stand."""

import os
import re
import subprocess
from pathlib import Path
from urllib.parse import urlparse

ROOT = Path(__file__).resolve().parents[1]
_ask = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)

project = "FlashAttention, wall by wall"
author = "the authors of FlashAttention, wall by wall"
release = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[0]
html_title = project
html_baseurl = os.environ.get("SITE_URL", "http://localhost:8000/").rstrip("/") + "/"
html_context = {"commit": _ask.stdout.strip() or "unknown", "release": release}
language = "en"

extensions = [
    "myst_nb", "sphinx_copybutton", "sphinx_sitemap", "sphinxext.opengraph", "notfound.extension",
]  # fmt: skip
exclude_patterns = ["blanks", "notebooks"]
suppress_warnings = ["mystnb.unknown_mime_type", "misc.highlighting_failure"]

nb_execution_mode = "off"
nb_merge_streams = True
nb_output_stderr = "remove"
nb_render_markdown_format = "myst"  # tables, regions and diffs are outputs in Markdown, with HTML in it
nb_mime_priority_overrides = [
    ("html", "text/markdown", 0), ("html", "text/html", 1), ("html", "image/svg+xml", 2), ("html", "image/png", 3),
    ("html", "text/plain", 10),
]  # fmt: skip
myst_enable_extensions = ["dollarmath", "amsmath", "html_image"]
myst_heading_anchors = 4
myst_links_external_new_tab = True
mathjax_path = "mathjax/tex-chtml.js"  # of npm, so that a reader needs no other host
copybutton_selector = "div.cell_input pre, article > section pre"

html_theme = "furo"
templates_path = ["_templates"]
html_static_path = ["_static", str(ROOT / "build" / "site-static")]
html_css_files = ["course.css"]
html_js_files = [("course.js", {"type": "module"})]
html_favicon = "_static/icon.svg"
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
html_use_index = False
html_search_scorer = str(ROOT / "build" / "site-source" / "scorer.js")

sitemap_url_scheme = "{link}"
sitemap_excludes = ["search.html", "genindex.html", "404.html", "folds/*"]
ogp_site_url = html_baseurl
ogp_image = html_baseurl + "_static/tiles.png"
ogp_image_alt = "One step of FlashAttention's forward pass"
ogp_social_cards = {"enable": False}
notfound_urls_prefix = urlparse(html_baseurl).path
linkcheck_timeout = 20
linkcheck_ignore = [r"http://localhost"]
