"""Parsing of our HTML, for tests."""

import base64
import io
import re
from html.parser import HTMLParser

from PIL import Image


class Reader(HTMLParser):
    """A page or a fragment: its tags, attributes, text and marked words. Tags that are not closed in order fail."""

    def __init__(self, page):
        super().__init__()
        self.tags, self.open, self.attributes, self.words, self.marks = [], [], [], [], []
        self.feed(page)
        assert self.open == []  # every tag is closed

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)
        if self.open and self.open[-1] in ("del", "ins"):
            self.marks.append((self.open[-1], data))

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


def embedded_images(page):
    """The PNG images inside a page."""
    data = re.findall(r'src="data:image/png;base64,([^"]+)"', page)
    return [Image.open(io.BytesIO(base64.b64decode(one))) for one in data]
