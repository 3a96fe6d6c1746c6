#!/usr/bin/env python3
"""Runs each `paceline run` command of a page, with a program that does nothing.

    tests/docs/check_commands.py PAGE PACELINE
"""

import pathlib
import re
import shlex
import subprocess
import sys

COMMAND = re.compile(r"`(paceline run [^`]*\./train[^`]*)`")


def main(page, paceline):
    commands = COMMAND.findall(pathlib.Path(page).read_text())
    if not commands:
        sys.exit(f"{page}: no `paceline run` command was found")
    for command in commands:
        stand_ins = {"paceline": paceline, "./train": "true"}
        words = [stand_ins.get(word, word) for word in shlex.split(command)]
        result = subprocess.run(words, capture_output=True, text=True, check=False)
        if result.returncode != 0:
            sys.exit(f"{page}: {command}\n{result.stderr}")


if __name__ == "__main__":
    main(*sys.argv[1:])
