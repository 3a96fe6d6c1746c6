"""Checks that each link of a site's pages to a file beside them leads to one.

    check_links.py DIRECTORY
"""

import html.parser
import pathlib
import sys
import urllib.parse


class Links(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = set()

    def handle_starttag(self, tag, attrs):
        self.found |= {value for name, value in attrs if name in ("href", "src") and value}


def main():
    site = pathlib.Path(sys.argv[1])
    broken = 0
    for page in sorted(site.rglob("*.html")):
        links = Links()
        links.feed(page.read_text(encoding="utf-8"))
        for link in sorted(links.found):
            url = urllib.parse.urlsplit(link)
            if not url.scheme and url.path and not (page.parent / url.path).exists():
                print(f"{page}: leads to {link}, which does not exist")
                broken += 1
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
