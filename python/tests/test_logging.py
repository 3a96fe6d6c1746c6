#!/usr/bin/env python3
"""The library's messages in Python's logging."""

import logging
import logging.handlers
import queue
import subprocess
import sys
import unittest

import torch.distributed as dist

import ranks

LOGGER = logging.getLogger("paceline")

# Each call makes the library log a warning.
WARN = '''
import torch
import torch.distributed as dist
import paceline

def warn():
    model = paceline.DistributedDataParallel(torch.nn.Linear(2, 2))
    model.module(torch.ones(1, 2)).sum().backward()

dist.init_process_group("paceline", store=dist.HashStore(), rank=0, world_size=1)
'''

# A handler waits for a lock that the main thread holds, while the main thread logs, too.
BLOCKED_HANDLER = WARN + '''
import logging, threading

entered, lock, texts = threading.Event(), threading.Lock(), []

class Handler(logging.Handler):
    def emit(self, record):
        entered.set()
        with lock:
            texts.append(record.getMessage())

logging.getLogger("paceline").addHandler(Handler())
thread = threading.Thread(target=warn)
with lock:
    thread.start()
    entered.wait()
    warn()
thread.join()
'''

# The parent's thread that logs is not in the child.
FORK = WARN + '''
import os, sys

warn()
child = os.fork()
if child == 0:
    import logging
    logging.getLogger("paceline").addHandler(logging.StreamHandler(sys.stdout))
    warn()
    sys.exit()
sys.exit(os.waitpid(child, 0)[1])
'''


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def wait_for_a_late_rank() -> list[logging.LogRecord]:
    """Rank 1 comes once rank 0 has logged that it is late. Two records of rank 0."""
    records: queue.Queue[logging.LogRecord] = queue.Queue()
    LOGGER.addHandler(logging.handlers.QueueHandler(records))
    LOGGER.setLevel(logging.INFO)
    if dist.get_rank() == 1:
        store().wait(["logged"])
        dist.barrier()
        return []
    work = dist.barrier(async_op=True)
    first = records.get()
    store().set("logged", "")
    work.wait()
    return [first, records.get()]


def run(script: str) -> tuple[int, str, str]:
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=ranks.PATIENCE)
    return result.returncode, result.stdout, result.stderr


class Logging(unittest.TestCase):
    WARNING = "DistributedDataParallel averaged nothing"

    def test_a_rank_that_waits_names_the_late_one(self) -> None:
        records = ranks.run(wait_for_a_late_rank, "paceline", 2)[0]
        self.assertEqual([record.levelname for record in records], ["WARNING", "INFO"])
        self.assertRegex(records[0].getMessage(), "^rank 0 has waited 1[0-9] s for rank 1 at barrier, call 1 of group ")
        self.assertRegex(records[1].getMessage(), "^barrier, call 1 of group .* went on after [0-9]+ s$")

    def test_warnings_go_to_stderr_by_default_also_just_before_the_end(self) -> None:
        code, _, errors = run(WARN + "warn()")
        self.assertEqual((code, errors.count(self.WARNING)), (0, 1), errors)

    def test_they_can_be_silenced(self) -> None:
        code, _, errors = run(WARN + "import logging; logging.getLogger('paceline').setLevel(logging.ERROR); warn()")
        self.assertEqual((code, errors.count(self.WARNING)), (0, 0), errors)

    def test_a_handler_that_blocks_blocks_no_thread_of_the_library(self) -> None:
        code, _, errors = run(BLOCKED_HANDLER)
        self.assertEqual(code, 0, errors)

    def test_a_handler_that_raises_harms_nobody(self) -> None:
        code, _, errors = run(WARN + "import logging; logging.getLogger('paceline').addFilter(lambda record: 1 / 0); warn(); warn()")
        self.assertEqual((code, errors.count("ZeroDivisionError")), (0, 2), errors)

    def test_a_forked_child_logs(self) -> None:
        code, output, errors = run(FORK)
        self.assertEqual((code, output.count(self.WARNING)), (0, 1), errors)


if __name__ == "__main__":
    unittest.main()
