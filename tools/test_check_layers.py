#!/usr/bin/env python3
"""Plants each kind of violation in a small tree and expects check_layers.py to name it."""

import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import check_layers

CLEAN = {
    "include/paceline/error.h": "#include <string>",
    "include/paceline/ddp.h": "#include <torch/torch.h>\n#include <paceline/error.h>",
    "src/base/log.h": '#include "paceline/error.h"',
    "src/shm/group.h": '#include "base/log.h"',
    "src/launch/job.h": '#include "base/log.h"',
    "src/trace/timeline.h": '#include "base/log.h"',
    "src/parallel/ddp/ddp.cpp": '#include "paceline/ddp.h"\n#include "shm/group.h"',
    "apps/paceline/main.cpp": '#include "launch/job.h"\n#include "report/page.h"',
    "apps/paceline/report/page.h": '#include "trace/timeline.h"',
    "apps/doctor/main.cpp": '#include <torch/torch.h>\n#include "launch/job.h"\n#include "check.h"',
    "apps/doctor/check.h": "",
    "examples/one/main.cpp": "#include <paceline/ddp.h>",
    "tests/support/ranks.h": '#include "shm/group.h"',
}


class CheckLayers(unittest.TestCase):
    def violations(self, **planted):
        with tempfile.TemporaryDirectory() as directory:
            root = pathlib.Path(directory)
            for name, text in {**CLEAN, **planted.get("files", {})}.items():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                (root / name).write_text(text)
            return list(check_layers.violations(root))

    def expect(self, name, text, message):
        self.assertEqual(self.violations(files={name: text}), [f"{name}:{message}"])

    def test_a_clean_tree_passes(self):
        self.assertEqual(self.violations(), [])

    def test_upward_include(self):
        self.expect("src/base/cores.cpp", '\n#include "shm/group.h"',
                    "2: includes shm/group.h, but base must not include shm")

    def test_launch_beside_node(self):
        self.expect("src/launch/job.cpp", '#include "shm/group.h"',
                    "1: includes shm/group.h, but launch must not include shm")

    def test_trace_beside_node_and_launch(self):
        self.expect("src/trace/file.cpp", '#include "shm/group.h"',
                    "1: includes shm/group.h, but trace must not include shm")
        self.expect("src/trace/file.cpp", '#include "launch/job.h"',
                    "1: includes launch/job.h, but trace must not include launch")
        self.expect("src/shm/bad.cpp", '#include "trace/timeline.h"',
                    "1: includes trace/timeline.h, but shm must not include trace")

    def test_report_beside_launch_and_below_the_command(self):
        self.expect("apps/paceline/report/bad.cpp", '#include "launch/job.h"',
                    "1: includes launch/job.h, but apps/paceline/report must not include launch")
        self.expect("src/trace/bad.cpp", '#include "report/page.h"',
                    "1: includes report/page.h, but trace must not include apps/paceline/report")

    def test_the_programs_stand_apart(self):
        self.expect("apps/doctor/bad.cpp", '#include "report/page.h"',
                    "1: includes report/page.h, but apps/doctor must not include apps/paceline/report")
        self.expect("src/launch/bad.cpp", '#include "check.h"',
                    "1: includes check.h, but launch must not include apps/doctor")

    def test_public_header_of_a_higher_layer(self):
        self.expect("src/distributed/init.cpp", "#include <paceline/ddp.h>",
                    "1: includes paceline/ddp.h, but distributed must not include parallel")

    def test_torch_directly_and_through_a_header(self):
        self.expect("src/shm/bad.cpp", "#include <c10/core/Device.h>",
                    "1: includes c10/core/Device.h, but shm is free of torch")
        found = self.violations(files={"src/base/bad.h": "#include <ATen/core/Tensor.h>",
                                       "apps/paceline/bad.cpp": '#include "base/bad.h"'})
        self.assertEqual(found, [
            "src/base/bad.h:1: includes ATen/core/Tensor.h, but base is free of torch",
            "apps/paceline/bad.cpp:1: includes base/bad.h, but apps/paceline is free of torch"])

    def test_include_without_a_space(self):
        self.expect("src/shm/bad.cpp", "#include<torch/torch.h>",
                    "1: includes torch/torch.h, but shm is free of torch")

    def test_other_suffix(self):
        self.expect("src/shm/bad.hpp", "", "1: ends in .hpp; C++ files here end in .h or .cpp")

    def test_no_sources(self):
        with tempfile.TemporaryDirectory() as directory:
            done = subprocess.run([sys.executable, check_layers.__file__, directory], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn(f"{directory} has no C++ files", done.stderr)

    def test_public_header_includes_internal(self):
        self.expect("include/paceline/log.h", '#include "base/log.h"',
                    "1: includes base/log.h, but public must not include base")

    def test_example_sees_the_public_api_only(self):
        self.expect("examples/one/more.cpp", '#include "shm/group.h"',
                    "1: includes shm/group.h, but examples must not include shm")

    def test_nothing_but_tests_includes_tests(self):
        self.expect("src/shm/bad.cpp", '#include "support/ranks.h"',
                    "1: includes support/ranks.h, but shm must not include tests")

    def test_unknown_folder(self):
        self.expect("src/misc/x.cpp", "",
                    "1: no layer is called misc; src/CMakeLists.txt lists them")


class ArchitecturePage(unittest.TestCase):
    page = (check_layers.ROOT / "docs" / "architecture.md").read_text()

    def test_draws_the_layers(self):
        drawing = self.page.split("```")[1]
        self.assertCountEqual(re.findall(r"\|\s+([a-z]+)\s{2,}", drawing), check_layers.LIBRARY)

    def test_names_parts_that_exist(self):
        for cell in re.findall(r"^\| (`.*?) \|", self.page, re.MULTILINE):
            first, *others = re.findall(r"`(.+?)`", cell)
            for name in [first.rstrip("/"), *(pathlib.Path(first).parent / other for other in others)]:
                found = [*check_layers.ROOT.glob(f"{name}"), *check_layers.ROOT.glob(f"{name}.*")]
                self.assertTrue(found, f"{name} in {cell}")


if __name__ == "__main__":
    unittest.main()
