"""Checks that each link of a site's pages to a file beside them leads to one, and to an anchor in it. Also that
no page shows Doxygen's own commands, as it does where it has misread Markdown.

    check_links.py DIRECTORY
"""

import html.parser
import pathlib
import re
import sys
import urllib.parse

COMMANDS = re.compile(r"@(?:ref|section|verbatim)\b|</?(?:tt|table)\b")


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = set()
        self.commands = []
        # Doxygen links to nested classes even if all are private, and then has no list of them.
        self.anchors = {"", "nested-classes"}

    def handle_starttag(self, tag, attrs):
        self.found |= {value for name, value in attrs if name in ("href", "src") and value}
        self.anchors |= {value for name, value in attrs if name in ("id", "name")}

    def handle_data(self, data):
        self.commands += COMMANDS.findall(data)


def read(page):
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def main():
    site = pathlib.Path(sys.argv[1]).resolve()
    pages = {page: read(page) for page in sorted(site.rglob("*.html"))}
    if not any(links.found for links in pages.values()):
        sys.exit(f"{site} has no pages with links")
    broken = 0
    for page, links in pages.items():
        if links.commands:
            print(f"{page}: shows {links.commands[0]}, so a part of the page is misread")
            broken += 1
        for link in sorted(links.found):
            url = urllib.parse.urlsplit(link)
            target = (page.parent / url.path).resolve() if url.path else page
            if url.scheme or url.netloc:
                continue
            if not target.exists():
                print(f"{page}: leads to {link}, which does not exist")
                broken += 1
            elif target in pages and urllib.parse.unquote(url.fragment) not in pages[target].anchors:
                print(f"{page}: leads to {link}, but {target.name} has no such anchor")
                broken += 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
