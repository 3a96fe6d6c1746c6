#!/usr/bin/env python3
"""Runs clang-tidy on every source file that BUILD_DIR compiles, in parallel.

    tools/tidy.py BUILD_DIR

Tests that include torch are left out: 20 seconds each, for what never ships.
A file that was clean is not looked at again before it, a header of ours that it includes, its
compile command, .clang-tidy or clang-tidy's version changes: build/lint holds a stamp for each.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import check_layers

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAMPS = ROOT / "build" / "lint"

# Each of these costs about a second in a file that includes torch/torch.h, since clang-tidy 14
# matches inside system headers too; together, half the time. What is left still holds the static
# analyzer, which follows uses after a move as well.
TOO_SLOW_WITH_TORCH = """
    bugprone-assert-side-effect bugprone-dangling-handle
    bugprone-implicit-widening-of-multiplication-result bugprone-infinite-loop
    bugprone-misplaced-widening-cast bugprone-multiple-statement-macro
    bugprone-not-null-terminated-result bugprone-reserved-identifier bugprone-sizeof-expression
    bugprone-stringview-nullptr bugprone-suspicious-semicolon bugprone-suspicious-string-compare
    bugprone-unused-raii bugprone-unused-return-value bugprone-use-after-move
    misc-definitions-in-headers misc-unused-using-decls modernize-use-nullptr modernize-use-using
    performance-move-const-arg performance-unnecessary-value-param
    readability-container-size-empty""".split()


def includes_torch(files):
    return any(check_layers.TORCH.match(name)
               for file in files for _, name, _ in check_layers.includes(ROOT, file))


class Job:
    """One source file and how it is checked."""

    def __init__(self, build, entry, version):
        self.source = pathlib.Path(entry["file"]).relative_to(ROOT)
        files = sorted(check_layers.closure(ROOT, self.source))
        self.slow = includes_torch(files)
        checks = ",".join(f"-{check}" for check in TOO_SLOW_WITH_TORCH) if self.slow else ""
        # The compile commands are GCC's, which knows warnings that Clang does not.
        self.command = ["clang-tidy", "--quiet", f"-p={build}", f"--checks={checks}",
                        "--extra-arg=-Wno-unknown-warning-option", str(self.source)]
        key = hashlib.sha256(repr((version, entry["command"], self.command)).encode())
        for file in [ROOT / ".clang-tidy", *files]:
            key.update((ROOT / file).read_bytes())
        self.stamp = STAMPS / key.hexdigest()

    def run(self):
        """The complaints, empty if there are none."""
        if self.stamp.exists():
            return ""
        done = subprocess.run(self.command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode == 0:
            self.stamp.touch()
            return ""
        return done.stdout or done.stderr


def jobs(build):
    version = subprocess.run(["clang-tidy", "--version"], capture_output=True, text=True,
                             check=True).stdout
    entries = json.loads((build / "compile_commands.json").read_text())
    ours = {entry["file"]: entry for entry in entries
            if pathlib.Path(entry["file"]).is_relative_to(ROOT)
            and not pathlib.Path(entry["file"]).is_relative_to(build)}
    found = [Job(build, entry, version) for entry in ours.values()]
    found = [job for job in found if not (job.slow and job.source.parts[0] == "tests")]
    return sorted(found, key=lambda job: not job.slow)  # the long ones first


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
    for stale in set(STAMPS.iterdir()) - {job.stamp for job in todo}:
        stale.unlink()
    print(f"clang-tidy: {len(todo)} files, {failed} with complaints")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
