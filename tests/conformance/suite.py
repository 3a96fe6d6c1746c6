"""Runs PyTorch's own tests of torch.distributed against one backend, with one number of ranks.

A process of its own, started by `run`: PyTorch's suite reads the backend's name and the number of ranks when it is
imported, so each pair of them needs a new interpreter. Within it each test forks its ranks from this process, which has
imported torch but has not computed with it. What a test did is written as one line of JSON.
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
    """Lets the suite take paceline for what it is: a backend for CPU tensors that can do all that Gloo can."""
    import torch.distributed as dist
    from torch.testing._internal import common_distributed

    import paceline

    if variant == "paceline":
        paceline.register()
        for feature in ("ddp", "subgroup", "gpu", "cuda", "plugin"):
            common_distributed.DistTestCases.backend_feature[feature].add("paceline")
    elif variant == "paceline as gloo":
        # Its type stays CUSTOM: torch takes whatever has the type GLOO for a ProcessGroupGloo.
        dist.Backend.register_backend("gloo", paceline._create, extended_api=True, devices=["cpu"])


def expect_profile(suite: ModuleType, variant: str) -> None:
    """Has the suite look for an event of each collective in a profile, as it does with Gloo.

    An event bears the name that the backend gives itself, "paceline:all_reduce". Where paceline stands in for Gloo, the
    suite asks for "gloo:all_reduce".
    """
    if variant == "paceline":
        suite.PROFILING_SUPPORTED_BACKENDS.append("paceline")
        suite.SEND_RECV_PROFILING_SUPPORTED_BACKENDS.append("paceline")
    elif variant == "paceline as gloo":
        find = suite.get_profiling_event

        def find_ours(name: str, *given: Any, **named: Any) -> list[Any]:
            events = find(re.sub("^gloo:", "paceline:", name), *given, **named)
            for event in events:
                event.name = re.sub("^paceline:", "gloo:", event.name)
            return events

        suite.get_profiling_event = find_ours


def lift(ranks: int) -> None:
    """Keeps the suite from skipping the tests of cases.LIFTED and cases.ON_CPU.

    The conditions are decorators, which see the name of what they decorate; hence this comes before the suite's import.
    """
    from torch.testing._internal import common_distributed, common_utils

    lifted = cases.LIFTED | cases.ON_CPU

    def spare(decorator: Function) -> Function:
        return lambda function: function if function.__name__ in lifted else decorator(function)

    def spare_made(factory: Function) -> Function:
        return lambda *given, **named: spare(factory(*given, **named))

    common_distributed.skip_if_no_gpu = spare(common_distributed.skip_if_no_gpu)
    if ranks > 2:  # its tests have a group of the ranks 1 and 2
        common_distributed.skip_if_small_worldsize = spare(common_distributed.skip_if_small_worldsize)
    for module, name in ((common_distributed, "skip_if_lt_x_gpu"), (common_utils, "skip_but_pass_in_sandcastle_if"),
                         (unittest, "skipIf"), (unittest, "skip")):
        setattr(module, name, spare_made(getattr(module, name)))


def make_case(suite: ModuleType) -> type[unittest.TestCase]:
    """The class that PyTorch's test_distributed_spawn.py defines, but with ranks that are forked, checked and ended."""
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

        def run_test(self, name: str, pipe: Any) -> None:
            if name in cases.ON_CPU:
                on_cpu.install(int(self.world_size))
            super().run_test(name, pipe)

        def _barrier(self, wait_for: int | None = None, timeout: float = 10) -> None:
            # 10 seconds are too few for ranks that share two cores with other work.
            super()._barrier(wait_for, max(timeout, 60))

        def _check_return_codes(self, function: Function, elapsed: float) -> None:
            super()._check_return_codes(function, elapsed)
            for rank, process in enumerate(self.processes):  # the suite looks at rank 0 only
                if (process.exitcode or 0) < 0:
                    raise RuntimeError(f"Process {rank} was ended by signal {-process.exitcode}")

    common_distributed.TIMEOUT_OVERRIDE.clear()
    return Case


def run_test(case: type[unittest.TestCase], name: str, timeout: float, log: Path) -> dict[str, Any]:
    """Runs one test; its output goes to `log`, whose end is part of the outcome if the test failed."""
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
    parser.add_argument("report", type=int, help="the descriptor that gets the names of the tests and the outcomes")
    parser.add_argument("timeout", type=float)
    parser.add_argument("only", help="a regular expression: run the tests that have it in their name")
    parser.add_argument("begin", type=int, help="how many of them to leave out: those that are done")
    options = parser.parse_args()

    lift(int(os.environ["WORLD_SIZE"]))
    if options.variant != "gloo":
        make_known(options.variant)
    from torch.testing._internal.distributed import distributed_test

    expect_profile(distributed_test, options.variant)
    case = make_case(distributed_test)
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
