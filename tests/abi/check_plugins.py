"""Checks the library's plug-ins.

    check_plugins.py NM DIRECTORY [NAME...]

Each exports one function, by which the library finds it: other names could replace a program's. Those
named must be there.
"""

import pathlib
import subprocess
import sys


def exported(nm, library):
    lines = subprocess.run([nm, "-D", "--defined-only", library], check=True, capture_output=True,
                           text=True).stdout.splitlines()
    # Weak symbols are of inline code in headers.
    return [name for _, kind, name in (line.split(maxsplit=2) for line in lines) if kind not in "VWu"]


def main():
    nm, directory, *needed = sys.argv[1:]
    plugins = {path.stem: exported(nm, path) for path in pathlib.Path(directory).glob("*.so")}
    wrong = [f"{name} exports {', '.join(names) or 'nothing'}" for name, names in plugins.items()
             if len(names) != 1 or not names[0].startswith("paceline_")]
    wrong += [f"missing: {name}" for name in needed if name not in plugins]
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
