"""Checks of a page without a browser: its text and tables, that it needs no other file, and that it fits a phone."""

from __future__ import annotations

import base64
import re
from html.parser import HTMLParser
from xml.etree import ElementTree


class Page(HTMLParser):
    """Collects the words, table cells by row, and all URLs that a browser would fetch; `between` separates elements."""

    def __init__(self, text, between=""):
        super().__init__()
        self.words, self.fetched, self.tags, self.rows = [], [], [], []
        self.feed(text)
        self.text = " ".join(between.join(self.words).split())

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "tr":
            self.rows.append([])
        self.fetched += [value for name, value in attributes if name in ("src", "href", "srcset", "data")]

    def handle_data(self, data):
        self.words.append(data)
        if self.tags and self.tags[-1] in ("td", "th") and data.strip():
            self.rows[-1].append(data)

    def needs_nothing_but_itself(self):
        """Check that all images are embedded SVGs; return True if no other element loads a file."""
        for source in self.fetched:
            head, code = source.split(",", 1)
            assert head == "data:image/svg+xml;base64"
            ElementTree.fromstring(base64.b64decode(code))  # raises unless it is well-formed
        return not {"script", "link", "iframe", "object"} & set(self.tags)


class _Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.faults, self.metas, self.heads, self.cell, self.open = [], {}, [], 0, []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag == "meta":
            self.metas[found.get("name")] = found.get("content")
        if tag == "table":
            self.heads = []
            if self.open[-1:] != [("div", "table")]:
                self.faults.append("a table outside a box that scrolls")
        if tag == "tr":
            self.cell = 0
        if tag == "td":
            if found.get("data-head") != "".join(self.heads[self.cell]):
                self.faults.append(f"cell {self.cell} names {found.get('data-head')}, not {self.heads[self.cell]}")
            self.cell += 1
        if tag == "th":
            self.heads.append([])
        if tag not in ("meta", "img", "link", "br"):
            self.open.append((tag, found.get("class")))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "th":
            self.heads[-1].append(data)


def faults_on_a_phone(text):
    """Return faults on a phone: tables that do not scroll, cells without heading, wide images, decimal headings."""
    page = _Reader(text)
    faults = page.faults
    if page.metas.get("viewport") != "width=device-width, initial-scale=1":
        faults.append("no viewport")
    for rule in (r"\.table \{ overflow-x: auto", r"img \{ max-width: 100%", r"attr\(data-head\)", "color-scheme: dark"):
        if not re.search(rule, text):
            faults.append(f"no rule {rule}")
    if heads := re.findall(r"<td[^>]*>(?:layer )?\d+\.\d+: ", text):
        faults.append(f"heads that read as decimals: {heads}")
    return faults
