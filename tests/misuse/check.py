"""Compiles a source file that must not compile.

    check.py SOURCE COMPILER [FLAGS...]

Each line of SOURCE with a comment at its end is a mistake: the compiler must refuse it by one error,
a static_assert's, whose sentence has what the comment says. There must be no other error.
"""

import re
import subprocess
import sys


def main():
    source, *command = sys.argv[1:]
    with open(source, encoding="utf-8") as file:
        expected = re.findall(r"\S +// (.*)", file.read())
    compiled = subprocess.run([*command, "-fsyntax-only", source], check=False,
                              capture_output=True, text=True)
    errors = re.findall(r"error: (.*)", compiled.stderr)
    # GCC's words, those of clang 19 and of clang 14.
    said = [error for error in errors
            if re.search("static assertion failed|static_assert failed", error)]
    missing = [text for text in expected if not any(text in error for error in said)]
    if expected and not missing and len(errors) == len(expected):
        return 0
    print(f"{len(errors)} errors for {len(expected)} mistakes; of none is said: {missing}")
    print(compiled.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
