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
QUALIFIED = re.compile(r"\b(paceline(?=::)(?:::\w+)*)")
INNER_ARGUMENTS = re.compile(r"<[^<>]*>")
OURS = re.compile(r"((vtable|VTT|typeinfo|typeinfo name) for |(non-)?virtual thunk to )?paceline::")
NO_CODE = re.compile(r'//.*|"[^"\n]*"|^#.*', re.MULTILINE)
TOKEN = re.compile(
    r"\b(namespace|class|struct|enum(?: class)?)\s+(?:PACELINE_API\s+|\[\[\w+\]\]\s+)*([\w:]+)"
    r"|\b(operator\b|\w+(?=\s*\())|([(){};])")


def declared(code):
    """The qualified names of the classes and functions that a header declares; parameters are neither."""
    names, scopes, opening, parentheses = set(), [], None, 0
    for kind, scope, function, mark in TOKEN.findall(code):
        if mark in ("(", ")"):
            parentheses += 1 if mark == "(" else -1
        elif mark == "{":
            scopes.append(opening)
        elif mark == "}":
            scopes.pop()
        elif not mark and parentheses == 0 and None not in scopes and kind != "namespace":
            names.add("::".join([*scopes, scope or function]))
        opening = scope or None if not mark else None
    return names


def complaint(names, kind, symbol):
    """Why the library must not export `symbol`, or None if it may. `names` are declared in headers."""
    if BUILT_IN.search(symbol):
        return "another library's"
    if "::Impl::" in symbol:
        return "an implementation"
    # Templates' arguments are names too; without them a member follows its class.
    parts = [re.sub(r"operator(<=>|<<=?|>>=?|->\*?|[<>]=?)", "operator", symbol)]
    while inner := INNER_ARGUMENTS.findall(parts[0]):
        parts += inner
        parts[0] = INNER_ARGUMENTS.sub("", parts[0])
    if not all(name in names for part in parts for name in QUALIFIED.findall(part)):
        return "declared in no public header"
    if kind not in "VWu" and not OURS.match(symbol):
        return "not Paceline's"
    return None


def main():
    nm, library, include = sys.argv[1:]
    names = subprocess.run([nm, "-DC", "--defined-only", library], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    exported = [line.split(maxsplit=2)[1:] for line in names]
    code = "".join(NO_CODE.sub("", path.read_text(encoding="utf-8")) for path in pathlib.Path(include).rglob("*.h"))
    headers = declared(re.sub(r"\bTORCH_MODULE\((\w+)\)", r"class \1", code))
    wrong = [f"{why}: {name}" for kind, name in exported if (why := complaint(headers, kind, name))]
    if not any(name.startswith("paceline::init_process_group(") for _, name in exported):
        wrong.append("missing: paceline::init_process_group")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
