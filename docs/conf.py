"""Sphinx configuration of the documentation site.

    pip install sphinx myst-parser furo sphinx-copybutton
    sphinx-build -W docs build/site
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
# Pages whose text is a file of the repository's root; the text in docs is appended.
ROOT_PAGES = {
    "index": "README.md",
    "architecture": "ARCHITECTURE.md",
    "contributing": "CONTRIBUTING.md",
    "changelog": "CHANGELOG.md",
}

project = "weft"
release = re.findall(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
html_title = f"weft {release}"
html_theme = "furo"
html_show_sourcelink = False
html_show_copyright = False
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4


def read_source(app: Sphinx, page: str, source: list[str]) -> None:
    """Links of a page to pages of the site; other files are named instead of linked, because the site lacks them."""
    text = source[0]
    if page in ROOT_PAGES:
        app.env.note_dependency(str(ROOT / ROOT_PAGES[page]))
        text = (ROOT / ROOT_PAGES[page]).read_text() + "\n" + text
        text = re.sub(r"\]\((?!https?:|#|docs/)", "](../", text).replace("](docs/", "](")
    for name, file in ROOT_PAGES.items():
        text = text.replace(f"](../{file}", f"]({name}.md")
    source[0] = re.sub(r"\[`?([^\]`]+)`?\]\(\.\./([^)#]+)(#[^)]*)?\)", name_of_file, text)


def name_of_file(link: re.Match[str]) -> str:
    text, file = link[1], link[2]
    return f"`{file}`" if file.endswith(text) else f"{text} (`{file}`)"


def setup(app: Sphinx) -> None:
    app.connect("source-read", read_source)
