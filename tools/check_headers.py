#!/usr/bin/env python3
"""Compiles each public header alone, with Clang, which shows that it includes what it needs.

    tools/check_headers.py BUILD_DIR

Nearly all of the time would go to torch's headers. So a header that includes one of PRECOMPILED,
itself or through headers of ours, starts from that, compiled once. Its own part of what it includes
is not checked any less, since it would read that anyway.
paceline/mpi.h is left out: it needs an MPI, and tests/launchers compiles it.
"""

import concurrent.futures
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import check_layers
import tidy

PRECOMPILED = ["torch/nn/module.h", "torch/csrc/distributed/c10d/Store.hpp"]  # the larger first
INCLUDE = check_layers.ROOT / "include"


def command(build):
    """Clang with the flags of a source file that includes torch."""
    entry = next(entry for entry in json.loads((build / "compile_commands.json").read_text())
                 if entry["file"].endswith("/src/parallel/ddp/ddp.cpp"))
    # The flags are GCC's and name warnings that Clang does not have.
    return ["clang++", *itertools.chain(*tidy.flags(entry)), "-Wno-unknown-warning-option", "-Werror"]


def compile_text(words, text):
    """The errors; empty if there are none."""
    done = subprocess.run([*words, "-"], input=text, capture_output=True, text=True)
    return done.stderr or f"{words[0]} ended with {done.returncode}" if done.returncode else ""


def main():
    clang = command(pathlib.Path(sys.argv[1]).resolve())
    headers = [INCLUDE / "paceline" / "version.h",
               *sorted((INCLUDE / "paceline").glob("*.h"))]
    headers = [header for header in headers if header.name != "mpi.h"]
    with tempfile.TemporaryDirectory() as directory, \
            concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        def path_of(name):
            return str(pathlib.Path(directory) / f"{PRECOMPILED.index(name)}.pch")

        def precompile(name):
            return compile_text([*clang, "-x", "c++-header", "-o", path_of(name)],
                                f"#include <{name}>\n")

        for errors in filter(None, pool.map(precompile, PRECOMPILED)):
            sys.exit(errors)

        def check(header):
            start = []
            if header.exists():
                path = header.relative_to(check_layers.ROOT)
                names = set(check_layers.reached_names(check_layers.ROOT, path))
                start = [["-include-pch", path_of(name)] for name in PRECOMPILED if name in names]
            return compile_text(
                [*clang, *itertools.chain(*start[:1]), "-fsyntax-only", "-x", "c++"],
                f"#include <{header.relative_to(INCLUDE)}>\n")

        failed = [errors for errors in pool.map(check, headers) if errors]
    for errors in failed:
        print(errors)
    print(f"public headers: {len(headers)} compiled alone, {len(failed)} with errors")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
