"""Checks what the shared library exports.

    check.py NM LIBRARY INCLUDE_DIR

Whatever it exports, programs can link to, and other libraries with the same names (another fmt, say)
can replace at run time. So it exports what the headers in INCLUDE_DIR declare, and beside that only
weak symbols of inline code in LibTorch's and the standard library's headers, which all libraries of
a process have to share.
"""

import pathlib
import re
import subprocess
import sys

# Anywhere in a name, also as a template's argument.
BUILT_IN = re.compile(r"\b(fmt|nlohmann|CLI)::")
QUALIFIED = re.compile(r"\bpaceline::([\w:]*\w)")
OURS = re.compile(r"(?:vtable for |typeinfo for |typeinfo name for )?paceline::")
NO_CODE = re.compile(r'//.*|"[^"\n]*"|^#.*', re.MULTILINE)
SCOPE = re.compile(r"\b(?:namespace|class|struct)\s+(?:PACELINE_API\s+|\[\[\w+\]\]\s+)*([\w:]+)")


class Headers:
    """What the headers declare, by name alone."""

    def __init__(self, include):
        code = "".join(NO_CODE.sub("", path.read_text(encoding="utf-8"))
                       for path in pathlib.Path(include).rglob("*.h"))
        self.words = set(re.findall(r"\w+", code))
        self.scopes = {name for scope in SCOPE.findall(code) for name in scope.split("::")}

    def declare(self, qualified):
        *scopes, name = filter(None, qualified.split("::"))
        return name in self.words and self.scopes.issuperset(scopes)


def complaint(headers, kind, name):
    """Why the library must not export `name`, or None if it may."""
    if BUILT_IN.search(name):
        return "another library's"
    if "::Impl::" in name:
        return "an implementation"
    if not all(map(headers.declare, QUALIFIED.findall(name))):
        return "declared in no public header"
    if kind not in "VWu" and not OURS.match(name):
        return "not Paceline's"
    return None


def main():
    nm, library, include = sys.argv[1:]
    names = subprocess.run([nm, "-DC", "--defined-only", library], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    exported = [line.split(maxsplit=2)[1:] for line in names]
    headers = Headers(include)
    wrong = [f"{why}: {name}" for kind, name in exported if (why := complaint(headers, kind, name))]
    if not any(name.startswith("paceline::init_process_group(") for _, name in exported):
        wrong.append("missing: paceline::init_process_group")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
