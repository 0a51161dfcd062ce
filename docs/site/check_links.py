#!/usr/bin/env python3
"""Checks the links of a built site, with their anchors, and of the Markdown files as they lie in the repository.

usage: check_links.py SITE REPOSITORY
"""
import html.parser
import pathlib
import re
import sys
import urllib.parse


class Page(html.parser.HTMLParser):
    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = [], set()
        self.feed(path.read_text(errors="replace"))

    def handle_starttag(self, tag, attributes):
        for name, value in attributes:
            if value is None:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            if (name, tag) in (("href", "a"), ("href", "link"), ("src", "img"), ("src", "script")):
                self.links.append(value)


def site_problems(site):
    pages = {}

    def page(path):
        if path not in pages:
            pages[path] = Page(path)
        return pages[path]

    for path in sorted(site.rglob("*.html")):
        # Doxygen's own pages link among themselves as Doxygen makes them.
        if path.relative_to(site).parts[0] == "api" or path.name in ("404.html", "search.html"):
            continue
        for link in page(path).links:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                yield f"{path.relative_to(site)}: '{link}' leads to a file that is not there"
            elif parts.fragment and target.suffix == ".html" and parts.fragment not in page(target).anchors:
                yield f"{path.relative_to(site)}: '{link}': the page has no such heading"


def slug(heading):
    """GitHub's anchor of a heading."""
    text = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def repository_problems(root):
    def without_code(text):
        return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))

    files = sorted(root.glob("*.md")) + sorted((root / "docs").rglob("*.md"))
    for path in files:
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(path.read_text())):
            parts = urllib.parse.urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / parts.path).resolve() if parts.path else path
            if not target.exists():
                yield f"{path.relative_to(root)}: '{link}' leads to a file that is not there"
            elif parts.fragment and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", target.read_text(), flags=re.M | re.S), re.M)
                if parts.fragment not in map(slug, headings):
                    yield f"{path.relative_to(root)}: '{link}': {target.name} has no such heading"


def main():
    site, root = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    problems = list(site_problems(site)) + list(repository_problems(root))
    if problems:
        sys.exit("check_links: " + "\n             ".join(problems))
    print("check_links: all links lead somewhere")


if __name__ == "__main__":
    main()
