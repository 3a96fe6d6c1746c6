#!/usr/bin/env python3
"""Makes a program of the C++ blocks of a page.

    tests/docs/extract.py PAGE OUTPUT

The first block goes to the top of the program. Each other block becomes a function. The program runs
it in a world of its own, or without one if the block calls init_process_group itself. Errors of the
compiler and of the program name the lines of the page.
"""

import pathlib
import re
import sys

BLOCK = re.compile(r"^```cpp\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(text):
    """Yields each block and the line where it begins."""
    for found in BLOCK.finditer(text):
        yield found[1], text.count("\n", 0, found.start(1)) + 1


def function(block, line, page):
    return f'int block_{line}() {{\n#line {line} "{page}"\n{block}return 0;\n}}\n'


def call(block, line, page):
    world = "" if "init_process_group" in block else "auto world = paceline::init_process_group();"
    return (
        f"if (paceline::record([] {{ {world} return block_{line}(); }}) != 0) {{\n"
        f'  std::fprintf(stderr, "{page}: the block at line {line} failed\\n");\n'
        "  return 1;\n}\n"
    )


def main(page, output):
    found = list(blocks(pathlib.Path(page).read_text()))
    if len(found) < 2:
        sys.exit(f"{page}: {len(found)} blocks of C++; the first is only the top of the program, so nothing would run")
    (head, line), *rest = found
    program = [f'#line {line} "{page}"\n{head}']
    program += [function(block, line, page) for block, line in rest]
    program += ["int main() {\n", *[call(block, line, page) for block, line in rest], "}\n"]
    pathlib.Path(output).write_text("".join(program))


if __name__ == "__main__":
    main(*sys.argv[1:])
