"""What a page of HTML is made of."""

from __future__ import annotations

from html.parser import HTMLParser


class Outline(HTMLParser):
    """Tags, ids and rows of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.labels: list[str] = []
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value]
        if tag == "svg":
            self.labels.append(given.get("aria-label") or "")
