"""Checks of a page without a browser: its text and tables, and that it needs no other file."""

from __future__ import annotations

import base64
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
