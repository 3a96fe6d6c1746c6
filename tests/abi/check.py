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
HIDDEN = re.compile(r"\b(paceline::(base|shm|launch|trace|distributed|backends|ddp|sync_batch_norm)"
                    r"|fmt|nlohmann|CLI)::")
DETAIL = re.compile(r"\bpaceline::(?:data::)?detail::(\w+)")
OURS = re.compile(r"(?:vtable for |typeinfo for |typeinfo name for )?paceline::")


def main():
    nm, library, include = sys.argv[1:]
    headers = "".join(path.read_text(encoding="utf-8")
                      for path in pathlib.Path(include).rglob("*.h"))
    names = subprocess.run([nm, "-DC", "--defined-only", library], check=True,
                           capture_output=True, text=True).stdout.splitlines()
    exported = [line.split(maxsplit=2)[1:] for line in names]
    wrong = []
    for kind, name in exported:
        details = set(DETAIL.findall(name))
        if HIDDEN.search(name):
            wrong.append(f"internal: {name}")
        elif "::Impl::" in name:
            wrong.append(f"an implementation: {name}")
        elif any(not re.search(rf"\b{detail}\b", headers) for detail in details):
            wrong.append(f"detail that no header names: {name}")
        elif kind not in "VWu" and not OURS.match(name):
            wrong.append(f"not Paceline's: {name}")
    if not any(name.startswith("paceline::init_process_group(") for _, name in exported):
        wrong.append("missing: paceline::init_process_group")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
