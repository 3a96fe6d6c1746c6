#!/usr/bin/env python3
"""Runs clang-tidy on every source file that BUILD_DIR compiles, in parallel.

    tools/tidy.py BUILD_DIR

Headers take most of the time, above all torch's, so clang-tidy reads many files as one. There are
six groups: src/ and apps/ with torch; src/ without torch; src/ for a special instruction set; apps/
without torch; tests/; benchmarks/, models/, drawing/ and examples/. Names in anonymous namespaces
must be distinct within a group.
The path-sensitive analyzer doubles the time, so it reads only src/ and apps/. Tests that include
torch are skipped.
Left out is what BUILD_DIR does not compile: with the preset dev that is python/, the fuzzers,
planted_race.cpp, the programs of tests/consumer and tests/misuse, the programs of the benchmarks
for the MPIs of `make peers`, and the code behind PACELINE_FAULT_POINTS. But BUILD_DIR must compile every
source of src/ and apps/, and none in a unity build.
A clean job runs again only if one of its files, a header of ours that they include, a compile
command, .clang-tidy or clang-tidy's version changes: build/lint has a stamp for each job.
"""

import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys

import check_layers

ROOT = check_layers.ROOT
STAMPS = ROOT / "build" / "lint"
CLANG_TIDY = ROOT / ".tools/clang_tidy/data/bin/clang-tidy"  # not .tools/bin's, which is Python


def includes_torch(source):
    return any(map(check_layers.TORCH.match, check_layers.reached_names(ROOT, source)))


def flags(entry):
    """The flags of a compile command, without compiler, input and output: tuples of words."""
    words = iter(shlex.split(entry["command"])[1:])
    for word in words:
        flag = (word, next(words)) if word in ("-c", "-o", "-isystem") else (word,)
        if word not in ("-c", "-o"):
            yield flag


def instruction_set(entry):
    return [flag[0].removeprefix("-m") for flag in flags(entry) if flag[0].startswith("-m")]


def text_of(index, entry):
    """The file as a part of a larger one. Several programs each have a main; examples, which have no
    namespace, are put into one, after the headers that they include."""
    include = f'#include "{entry["file"]}"\n'
    if source_of(entry).parts[0] == "examples":
        headers = re.findall(r"^#include <.*>$", path_of(entry).read_text(), re.MULTILINE)
        include = "\n".join([*headers, f"namespace example_{index} {{", f"{include}}}\n"])
    return f"#define main main_{index}\n{include}#undef main\n"


class Job:
    """Source files that clang-tidy reads as one, and its command."""

    def __init__(self, name, entries, version):
        self.text = "".join(text_of(i, entry) for i, entry in enumerate(entries))
        self.together = STAMPS / f"{name}.cpp" if len(entries) > 1 else None
        source = self.together or entries[0]["file"]
        options = dict.fromkeys(flag for entry in entries for flag in flags(entry))
        checks = ["-bugprone-suspicious-include"] if self.together else []
        if source_of(entries[0]).parts[0] not in ("src", "apps"):
            checks.append("-clang-analyzer-*")
        # The compile commands are GCC's and name warnings that Clang does not have. Files that are
        # read as one are headers to clang-tidy: it shows their errors, and not their warnings.
        # -U leaves out the bodies of fmt's functions, in which bugprone-exception-escape would find an
        # error of malformed formats, which the compiler has excluded.
        self.command = [str(CLANG_TIDY), "--quiet", f"--config-file={ROOT / '.clang-tidy'}",
                        f"--checks={','.join(checks)}", str(source), "--", *itertools.chain(*options),
                        "-Werror", "-Wno-unknown-warning-option", "-UFMT_HEADER_ONLY"]
        files = set().union(*(check_layers.closure(ROOT, source_of(entry)) for entry in entries))
        key = hashlib.sha256(repr((version, self.text, self.command)).encode())
        for file in [ROOT / ".clang-tidy", *sorted(files)]:
            key.update((ROOT / file).read_bytes())
        self.stamp = STAMPS / key.hexdigest()

    def run(self):
        """The findings; empty if there are none."""
        if self.stamp.exists():
            return ""
        if self.together:
            self.together.write_text(self.text)
        done = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            self.stamp.touch()
            return ""
        return done.stdout or done.stderr or f"{shlex.join(self.command)}: ended with {done.returncode}"


def source_of(entry):
    return path_of(entry).relative_to(ROOT)


def path_of(entry):
    # CMake writes the path by which it was called, which may lead through a symbolic link.
    return pathlib.Path(entry["file"]).resolve()


def jobs(build):
    version = subprocess.run([CLANG_TIDY, "--version"], capture_output=True, text=True,
                             check=True).stdout
    entries = json.loads((build / "compile_commands.json").read_text())
    ours = {}
    for entry in entries:
        if path_of(entry).is_relative_to(ROOT) and not path_of(entry).is_relative_to(build):
            # CMake lists the library's entry of a file before the tests'.
            ours.setdefault(source_of(entry), entry)
    missing = [str(source) for source in check_layers.sources(ROOT)
               if source.suffix == ".cpp" and source.parts[0] in ("src", "apps")
               and source not in ours]
    if missing:
        sys.exit(f"{build} does not compile {missing[0]} (and {len(missing) - 1} more): "
                 "configure it with the preset dev")
    groups = {}
    for entry in ours.values():
        # Another MPI's headers would be found before those of the other sources of the group.
        if "-DMPI_ABI" in entry["command"]:
            continue
        top = source_of(entry).parts[0]
        torch = includes_torch(source_of(entry))
        if top == "src" or top == "apps" and torch:
            name = "-".join(["src", *["torch"] * torch, *instruction_set(entry)])
        elif top == "tests" and torch:
            continue
        else:
            name = top if top in ("apps", "tests") else "benchmarks"
        groups.setdefault(name, []).append(entry)
    return [Job(name, entries, version) for name, entries in groups.items()]


def main():
    build = pathlib.Path(sys.argv[1]).resolve()
    STAMPS.mkdir(parents=True, exist_ok=True)
    todo = jobs(build)
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for complaints in pool.map(Job.run, todo):
            if complaints:
                failed += 1
                print(complaints, flush=True)
    for stale in set(STAMPS.iterdir()) - {path for job in todo for path in (job.stamp, job.together)}:
        stale.unlink()
    print(f"clang-tidy: {len(todo)} runs, {failed} with findings")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
