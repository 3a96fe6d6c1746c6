#!/usr/bin/env python3
"""PyTorch's debug frontend, as docs/debugging.md starts it, on the ranks of a C++ program."""

import os
import re
import subprocess
import time
import unittest
import urllib.request
from typing import Any
from unittest import mock

from torch.distributed.debug import _frontend

from test_torchrun import PACELINE, REPOSITORY, free_port

RANKS = REPOSITORY / "build/release/bin/debugged_ranks"


def documented_handlers() -> list[_frontend.DebugHandler]:
    script = re.search(r"```python\n# RANK=0 [^\n]*\n(.*?)```", (REPOSITORY / "docs/debugging.md").read_text(), re.DOTALL)
    assert script
    names: dict[str, Any] = {}
    with mock.patch.object(_frontend, "main") as main:
        exec(script[1], names)
    handlers: list[_frontend.DebugHandler] = main.call_args.kwargs["handlers"]
    return handlers


@unittest.skipUnless(PACELINE.exists() and RANKS.exists(), f"needs {PACELINE} and {RANKS}")
class DebugFrontend(unittest.TestCase):
    def page(self, path: str) -> str:
        with urllib.request.urlopen(f"http://localhost:{self.port}{path}", timeout=60) as answer:
            text: str = answer.read().decode()
            return text

    def test_shows_who_waits_for_whom(self) -> None:
        port = free_port()
        job = subprocess.Popen([PACELINE, "run", "--nproc-per-node=3", "--master-port", port, RANKS],
                               env=os.environ | {"TORCH_FR_BUFFER_SIZE": "100"},
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert job.stdin and job.stdout
        with job, job.stdin:
            self.assertEqual(job.stdout.readline(), "[rank0]: served\n")
            variables = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            with mock.patch.dict(os.environ, variables):
                frontend = _frontend.FrontendServer(0, documented_handlers())
                self.port = frontend._server.server_address[1]
                deadline = time.monotonic() + 60
                # Each of three ranks shows that two wait.
                while self.page("/paceline").count('"waits": true') < 6:
                    self.assertLess(time.monotonic(), deadline)
                state, threads, calls = map(self.page, ("/paceline", "/stacks", "/fr_trace?backend=paceline"))
        self.assertEqual(state.count('"operation": "all_reduce of 3 float32"'), 6)
        self.assertEqual(threads.count("its threads as /proc shows them"), 3)
        row, *_ = (row for row in re.findall("<tr>(.*?)</tr>", calls) if "paceline:all_reduce" in row)
        cells = [cell.strip() for cell in re.findall("<td[^>]*>(.*?)</td>", row)]
        self.assertIn("{0, 1, 2}", cells)  # the ranks that are expected
        self.assertIn("{0}", cells)  # and the one that is missing
        self.assertEqual(job.returncode, 0)


if __name__ == "__main__":
    unittest.main()
