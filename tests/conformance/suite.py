"""Runs PyTorch's own tests of torch.distributed against one backend, with one number of ranks.

`run` starts it as a process of its own: PyTorch's suite reads the backend's name and the number of ranks at import, so each
pair of them needs a new interpreter. Each test forks its ranks from this process, which has imported torch but not used it to
compute. The outcome of each test is one line of JSON.
"""

import argparse
import json
import os
import re
import sys
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import cases

Function = Callable[..., Any]


def make_known(variant: str) -> None:
    """Tells the suite that paceline is a backend for CPU tensors with all features of Gloo."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    import paceline

    if variant == "paceline":
        paceline.register()
        for feature in ("ddp", "subgroup", "gpu", "cuda", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add("paceline")
    elif variant in cases.AS_GLOO:
        # Its type stays CUSTOM: torch casts a backend of type GLOO to ProcessGroupGloo.
        dist.Backend.register_backend("gloo", paceline._create, extended_api=True, devices=["cpu"])


def expect_profile(suite: ModuleType, variant: str) -> None:
    """Makes the suite look for an event of each collective in a profile, as it does for Gloo.

    An event has the backend's own name, "paceline:all_reduce". If paceline is registered as gloo, the suite asks for
    "gloo:all_reduce".
    """
    if variant == "paceline":
        suite.PROFILING_SUPPORTED_BACKENDS.append("paceline")
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("paceline")
    elif variant in cases.AS_GLOO:
        find = suite.get_profiling_event

        def find_ours(name: str, *given: Any, **named: Any) -> list[Any]:
            events = find(re.sub("^gloo:", "paceline:", name), *given, **named)
            for event in events:
                event.name = re.sub("^paceline:", "gloo:", event.name)
            return events

        suite.get_profiling_event = find_ours


def lift(ranks: int) -> None:
    """Keeps the suite from skipping the tests of cases.LIFTED and cases.ON_CPU.

    The conditions are decorators, which see the name of the test, so call this before the suite's import.
    """
    from torch.testing._internal import common_distributed, common_utils

    lifted = cases.LIFTED | cases.ON_CPU

    def spare(decorator: Function) -> Function:
        return lambda function: function if function.__name__ in lifted else decorator(function)

    def spare_made(factory: Function) -> Function:
        return lambda *given, **named: spare(factory(*given, **named))

    common_distributed.skip_if_no_gpu = spare(common_distributed.skip_if_no_gpu)
    if ranks > 2:  # these tests have a group of ranks 1 and 2
        common_distributed.skip_if_small_worldsize = spare(common_distributed.skip_if_small_worldsize)
    for module, name in ((common_distributed, "skip_if_lt_x_gpu"), (common_utils, "skip_but_pass_in_sandcastle_if"),
                         (unittest, "skipIf"), (unittest, "skip")):
        setattr(module, name, spare_made(getattr(module, name)))


def pretend_nodes(rank: int, size: int) -> None:
    """The second half of the ranks says that it runs on another node."""
    first = (size + 1) // 2
    node, local_rank, local_size = (0, rank, first) if rank < first else (1, rank - first, size - first)
    os.environ |= {"RANK": str(rank), "GROUP_RANK": str(node), "LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(local_size)}


def make_case(suite: ModuleType, variant: str) -> type[unittest.TestCase]:
    """The class of PyTorch's test_distributed_spawn.py, but it forks its ranks, checks and ends them."""
    import torch
    from torch.testing._internal import common_distributed

    import on_cpu

    class Case(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        def setUp(self) -> None:
            super().setUp()
            suite.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def tearDown(self) -> None:
            ranks = self.processes
            super().tearDown()
            for rank in ranks:
                rank.kill()
                rank.join()

        @classmethod
        def _run(cls, rank: int, *given: Any, **named: Any) -> None:
            if variant == "paceline on two nodes":
                pretend_nodes(rank, int(os.environ["WORLD_SIZE"]))
            super()._run(rank, *given, **named)

        def run_test(self, name: str, pipe: Any) -> None:
            if name in cases.ON_CPU:
                on_cpu.install(int(self.world_size))
            super().run_test(name, pipe)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            # 10 seconds are not enough for ranks that share two cores with other work.
            super()._barrier(wait_for, max(timeout, 60))

        def _check_return_codes(self, function: Function, elapsed: float) -> None:
            super()._check_return_codes(function, elapsed)
            for rank, process in enumerate(self.processes):  # the suite checks rank 0 only
                if (process.exitcode or 0) < 0:
                    raise RuntimeError(f"Process {rank} was ended by signal {-process.exitcode}")

    common_distributed.TIMEOUT_OVERRIDE.clear()
    return Case


def run_test(case: type[unittest.TestCase], name: str, timeout: float, log: Path) -> dict[str, Any]:
    """Runs one test with its output in `log`; if the test fails, the end of `log` is part of the outcome."""
    with log.open("w+", errors="replace") as output:
        for descriptor in (1, 2):
            os.dup2(output.fileno(), descriptor)
        result = unittest.TestResult()
        begin = time.monotonic()
        case(name).run(result)
        seconds = time.monotonic() - begin
        sys.stdout.flush()
        outcome: dict[str, Any] = {"test": name, "seconds": round(seconds, 2)}
        problems = result.errors + result.failures
        if problems:
            output.seek(0)
            outcome |= {"outcome": "hang" if seconds >= timeout else "fail", "reason": problems[0][1],
                        "log": output.read()[-20000:]}
        elif result.skipped:
            outcome |= {"outcome": "skip", "reason": result.skipped[0][1]}
        else:
            outcome |= {"outcome": "pass"}
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("variant", choices=cases.VARIANTS)
    parser.add_argument("report", type=int, help="descriptor for the names of the tests and the outcomes")
    parser.add_argument("timeout", type=float)
    parser.add_argument("only", help="regular expression: run the tests whose names match")
    parser.add_argument("begin", type=int, help="number of tests to skip because they are done")
    options = parser.parse_args()

    lift(int(os.environ["WORLD_SIZE"]))
    if options.variant != "gloo":
        make_known(options.variant)
    from torch.testing._internal.distributed import distributed_test

    expect_profile(distributed_test, options.variant)
    case = make_case(distributed_test, options.variant)
    case.setUpClass()
    log = Path(os.environ["TMPDIR"]) / "log"
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if re.search(options.only, name)]
    os.set_inheritable(options.report, False)
    with os.fdopen(options.report, "w", buffering=1) as report:
        print(json.dumps(names), file=report)
        for name in names[options.begin:]:
            print(json.dumps(run_test(case, name, options.timeout, log)), file=report)


if __name__ == "__main__":
    main()
