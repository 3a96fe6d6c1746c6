#!/usr/bin/env python3
"""The package itself: its version, its metadata, its types, its sdist, and what it says with another torch."""

import ast
import importlib.metadata
import importlib.util
import inspect
import os
import pickle
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

import torch.distributed as dist

import paceline
from paceline import _C

REPOSITORY = Path(__file__).resolve().parent.parent.parent
CLONE = (REPOSITORY / ".git").exists() and shutil.which("git")

# What a user's program may rely on: mypy --strict must accept this.
PROGRAM = '''
import torch
import torch.distributed as dist
import paceline

options = paceline.Options()
options.staging_bytes = 1 << 20
options.single_copy_bytes = None
dist.init_process_group("paceline", pg_options=options)
version: str = paceline.__version__
try:
    dist.all_reduce(torch.ones(1))
except paceline.Timeout as error:
    culprits: list[int] = error.ranks
    operation: str = error.operation
    sequence: int = error.sequence
'''


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=os.environ | environment)


class Package(unittest.TestCase):
    def test_one_version(self) -> None:
        version = importlib.metadata.version("paceline")
        self.assertEqual(paceline.__version__, version)
        self.assertIn(f"project(paceline VERSION {version} ", (REPOSITORY / "CMakeLists.txt").read_text())

    def test_metadata(self) -> None:
        metadata = importlib.metadata.metadata("paceline")
        self.assertEqual((metadata["Author"], metadata["License-Expression"]), ("The Paceline authors", "BSD-3-Clause"))
        self.assertEqual((metadata["Requires-Dist"], metadata["Requires-Python"]), ("torch==2.15.*", ">=3.11"))
        licence = importlib.metadata.distribution("paceline").read_text("licenses/LICENSE")
        self.assertEqual(licence, (REPOSITORY / "LICENSE").read_text())

    def test_long_description_is_complete_without_the_repository(self) -> None:
        text = importlib.metadata.metadata("paceline").get_payload()
        self.assertIn("pip install", text)
        self.assertEqual(re.findall(r"\]\((?!https?:)", text), [], "a relative link, which leads nowhere on PyPI")

    def test_documented(self) -> None:
        for name in paceline.__all__:
            if name != "__version__":
                self.assertTrue(inspect.getdoc(getattr(paceline, name)), name)
        for thing in (paceline, _C, _C.create, paceline.Options.staging_bytes, paceline.Options.single_copy_bytes):
            self.assertTrue(inspect.getdoc(thing), thing)

    def test_errors_survive_pickle(self) -> None:
        error = paceline.PeerLost("rank 1 was lost")
        error.ranks, error.operation, error.sequence = [1], "all_reduce", 17
        copy = pickle.loads(pickle.dumps(error))
        self.assertIsInstance(copy, dist.DistBackendError)
        self.assertEqual((type(copy), str(copy), vars(copy)), (paceline.PeerLost, str(error), vars(error)))


class Types(unittest.TestCase):
    @unittest.skipUnless(importlib.util.find_spec("mypy"), "needs mypy")
    def test_mypy_accepts_the_package_and_a_program(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            program = Path(directory, "program.py")
            program.write_text(PROGRAM)
            result = python("-m", "mypy", "--strict", "--cache-dir", directory, "-p", "paceline", "-p", "paceline_entry_points")
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            result = python("-m", "mypy", "--strict", "--cache-dir", directory, str(program))
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            program.write_text(PROGRAM + "    error.rank\n")
            self.assertIn('has no attribute "rank"', python("-m", "mypy", "--cache-dir", directory, str(program)).stdout)

    def test_the_stub_has_what_the_module_has(self) -> None:
        stub = ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text())
        functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
        classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
        self.assertEqual({*functions, *classes}, {name for name in vars(_C) if not name.startswith("__")})
        for name, function in functions.items():
            signature = getattr(_C, name).__doc__.splitlines()[0]
            self.assertEqual([argument.arg for argument in function.args.args], re.findall(r"(\w+): ", signature))
        for name, node in classes.items():
            members = {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)} | {
                item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            self.assertEqual(members - {"__init__"},
                             {member for member in vars(getattr(_C, name)) if not member.startswith("_")})


class AnotherTorch(unittest.TestCase):
    def test_the_last_line_says_what_to_do(self) -> None:
        for use in ('dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)', "import paceline"):
            result = python("-c", f"import torch\nimport torch.distributed as dist\ntorch.__version__ = '2.14.1+cpu'\n{use}")
            self.assertEqual(
                result.stderr.splitlines()[-1],
                "ImportError: this paceline was built for torch 2.15, but torch is 2.14.1+cpu: install torch==2.15.*, or a "
                "paceline built for torch 2.14.1+cpu")


@unittest.skipUnless(shutil.which("cmake") and shutil.which("g++"), "needs cmake and g++")
class Build(unittest.TestCase):
    def test_names_what_is_missing(self) -> None:
        options = [f"-DPACELINE_{part}=OFF" for part in ("BENCHMARKS", "COMMAND", "EXAMPLES", "TESTS")]
        options += [f"-DCMAKE_DISABLE_FIND_PACKAGE_{package}=ON" for package in ("fmt", "ZLIB")]
        with tempfile.TemporaryDirectory() as directory:
            result = subprocess.run(["cmake", "-S", REPOSITORY, "-B", directory, *options], capture_output=True, text=True)
        self.assertIn("build needs fmt, ZLIB. On Debian and Ubuntu: apt-get install libfmt-dev zlib1g-dev.",
                      " ".join(result.stderr.split()))


@unittest.skipUnless(CLONE and importlib.util.find_spec("scikit_build_core"), "needs a clone, git and scikit-build-core")
class Sdist(unittest.TestCase):
    def test_has_what_the_build_needs_and_nothing_else(self) -> None:
        with tempfile.TemporaryDirectory() as directory:
            subprocess.run([sys.executable, "-c", f"from scikit_build_core.build import build_sdist; build_sdist({directory!r})"],
                           cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
            (archive,) = Path(directory).iterdir()
            with tarfile.open(archive) as tar:
                names = {name.split("/", 1)[1] for name in tar.getnames()}
        tracked = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
        self.assertEqual(names - {"PKG-INFO"}, {name for name in tracked if re.match(
            r"cmake/|include/|src/|python/src/|(CMakeLists\.txt|LICENSE|pyproject\.toml|"
            r"python/(CMakeLists\.txt|README\.md|exports\.map|\w+\.(cpp|h)))$", name)})


if __name__ == "__main__":
    unittest.main()
