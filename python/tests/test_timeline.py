#!/usr/bin/env python3
"""Timelines of Python programs, judged by `paceline report`."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

PACELINE = Path(__file__).resolve().parent.parent.parent / "build/release/bin/paceline"

TRAIN = """
import time, torch, torch.distributed as dist, paceline
dist.init_process_group("paceline")
model = paceline.DistributedDataParallel(torch.nn.Linear(4, 1))
for step in range(30):
    if dist.get_rank() == 1:
        time.sleep(0.01)
    model(torch.ones(2, 4)).sum().backward()
dist.destroy_process_group()
"""


class Timelines(unittest.TestCase):
    def test_the_report_finds_the_late_rank(self) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
            subprocess.run([PACELINE, "run", "--nproc-per-node=2", sys.executable, "-c", TRAIN], check=True, timeout=120,
                           env=os.environ | {"PACELINE_TIMELINE": directory})
            report = subprocess.run([PACELINE, "report", "--json", directory], check=True, capture_output=True, timeout=60)
        found = json.loads(report.stdout)
        self.assertEqual((found["finding"], found["rank"], found["ranks"]), ("late_starter", 1, 2))
        self.assertEqual([bucket["parameters"] for bucket in found["buckets"]], ["bias, weight"])


if __name__ == "__main__":
    unittest.main()
