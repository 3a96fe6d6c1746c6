#!/usr/bin/env python3
"""Failures: which exception ranks get, and what it says about which rank."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import ranks

Failure = tuple[str, list[int], str, int]


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def failure(function: Any, *arguments: Any, **named: Any) -> Failure:
    """The text, ranks, operation and sequence of the error that the call must raise."""
    try:
        function(*arguments, **named)
    except dist.DistBackendError as error:
        return str(error), error.ranks, error.operation, error.sequence
    raise AssertionError("no error")


def calls_made() -> int:
    return dist.distributed_c10d._get_default_group()._get_sequence_number_for_group()


def works() -> bool:
    one = torch.ones(10)
    dist.all_reduce(one)
    return torch.equal(one, torch.full((10,), float(dist.get_world_size())))


def disagree(asynchronously: bool) -> tuple[int, list[Failure]]:
    """The number of calls before the failure, the failure, and the failure of a later call."""
    works()
    before = calls_made()
    tensor = torch.ones(3 + dist.get_rank())
    call = (lambda: dist.all_reduce(tensor, async_op=True).wait()) if asynchronously else lambda: dist.all_reduce(tensor)
    return before, [failure(call), failure(dist.barrier)]


def lose_a_rank() -> tuple[float, Failure, bool]:
    """Rank 1 is killed while the others wait for it; their own group goes on."""
    others = dist.new_group([0, 2])
    dist.barrier()
    if dist.get_rank() == 1:
        store().set("killed", str(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
    error = failure(dist.all_reduce, torch.ones(10))
    delay = time.monotonic() - float(store().get("killed"))
    one = torch.ones(10)
    dist.all_reduce(one, group=others)
    return delay, error, torch.equal(one, torch.full((10,), 2.0))


def misuse() -> tuple[list[str], bool]:
    """Invalid calls, and after them a valid one."""
    group = dist.distributed_c10d._get_default_group()
    rank, size, tensor = dist.get_rank(), dist.get_world_size(), torch.ones(4)
    calls = {
        "to itself": lambda: group.send([tensor], rank, 0),
        "to nobody": lambda: group.send([tensor], size, 0),
        "tag": lambda: group.send([tensor], (rank + 1) % size, -1),
        "root": lambda: group.broadcast(tensor, size),
        "list": lambda: dist.all_gather([torch.empty(4)] * (size + 1), tensor),
        "size": lambda: dist.all_gather_into_tensor(torch.empty(5), tensor),
        "type": lambda: dist.all_to_all_single(torch.empty(4, dtype=torch.int32), tensor),
        "op": lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND),
        "splits": lambda: dist.all_to_all_single(torch.empty(4), tensor, [1] * size, [1] * size),
        "asynchronously": lambda: dist.all_reduce(tensor, dist.ReduceOp.BAND, async_op=True),
    }
    passed = []
    for name, call in calls.items():
        try:
            call()
            passed.append(name)
        except (ValueError, TypeError):
            pass
    return passed, works()


def come_too_late() -> Failure | None:
    """Rank 1 stays away from a group with its own timeout until rank 0 has the error; the world goes on."""
    group = dist.new_group(timeout=timedelta(seconds=5))
    error = None
    if dist.get_rank() == 0:
        error = failure(dist.all_reduce, torch.ones(10), group=group)
        store().set("reported", "")
    store().wait(["reported"])
    assert works()
    return error


def wait_twice() -> tuple[Failure | None, torch.Tensor]:
    """A wait that times out does not end the call."""
    tensor = torch.ones(10)
    work, error = None, None
    if dist.get_rank() == 0:
        work = dist.all_reduce(tensor, async_op=True)
        error = failure(work.wait, timedelta(seconds=0.2))
        store().set("reported", "")
        work.wait()
    else:
        store().wait(["reported"])
        dist.all_reduce(tensor)
    return error, tensor


def receive_nothing() -> Failure | None:
    group = dist.new_group()
    dist.set_timeout(timedelta(seconds=0.3), group)  # busy ranks may need longer to form the group
    error = failure(dist.recv, torch.ones(10), 1, group=group) if dist.get_rank() == 0 else None
    dist.barrier()
    return error


def miss_a_monitored_barrier() -> Failure | None:
    """Rank 1 stays away until the others have the error; rank 0 comes after rank 2, and reports who is missing."""
    dist.monitored_barrier()
    error = None
    if dist.get_rank() == 2:
        store().set("2 comes", "")
    if dist.get_rank() == 0:
        store().wait(["2 comes"])
    if dist.get_rank() != 1:
        error = failure(dist.monitored_barrier, timeout=timedelta(seconds=5 if dist.get_rank() == 0 else 60),
                       wait_all_ranks=True)
        store().set(f"reported {dist.get_rank()}", "")
    store().wait([f"reported {rank}" for rank in range(dist.get_world_size()) if rank != 1])
    return error


def monitored_barrier_beside_all_reduce() -> Failure:
    if dist.get_rank() == 1:
        return failure(dist.monitored_barrier)
    return failure(dist.all_reduce, torch.ones(10))


def traces() -> dict[int, list[dict[str, Any]]]:
    """The entries in the flight recorder's files of the ranks."""
    prefix = Path(os.environ["TORCH_FR_DUMP_TEMP_FILE"])
    return {int(path.name.removeprefix(prefix.name)): pickle.loads(path.read_bytes())["entries"]
            for path in prefix.parent.glob(prefix.name + "*")}


def hang() -> tuple[list[dict[str, Any]], dict[int, list[dict[str, Any]]]]:
    """Rank 0 calls an all_reduce, rank 1 does not."""
    dist.all_gather_object([None, None], "both")
    if dist.get_rank() == 0:
        dist.set_timeout(timedelta(seconds=0.5))
        failure(dist.all_reduce, torch.ones(7, 3))
        entries = pickle.loads(c10d._dump_fr_trace(backend="paceline"))["entries"]
        files = traces()
        store().set("reported", "")
        return entries, files
    store().wait(["reported"])
    return pickle.loads(c10d._dump_fr_trace(backend="paceline"))["entries"], {}


LOSS = """
import os, signal, time
import torch, torch.distributed as dist
dist.init_process_group("paceline")
dist.barrier()
if dist.get_rank() == 1:
    print(time.monotonic(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    dist.barrier()
except dist.DistBackendError:
    print(time.monotonic(), flush=True)
"""


class Failures(ranks.Case):
    def test_a_mismatch_names_the_ranks(self) -> None:
        for asynchronously in (False, True):
            for before, error in ranks.run(disagree, self.backend, 2, asynchronously):
                first, later = error
                self.assertIn("rank 0 called all_reduce of 3 float32, rank 1 all_reduce of 4 float32", first[0])
                self.assertEqual(first[1:], ([0, 1], "all_reduce", before + 1))
                # The same cause, in another operation.
                self.assertEqual(later[:3], (first[0], [0, 1], "barrier"))
                self.assertNotEqual(later[3], first[3])

    def test_a_killed_rank_is_named_at_once(self) -> None:
        for result in ranks.run(lose_a_rank, self.backend, 3, dying=[1])[::2]:
            delay, (text, culprits, operation, _), others_work = result
            self.assertLess(delay, 30)  # no timeout
            self.assertRegex(text, r"rank 1( on node 0)? was lost")
            self.assertEqual((culprits, operation), ([1], "all_reduce"))
            self.assertTrue(others_work)

    def test_no_trace_is_written_without_its_variable(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_")}
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as in torchrun's agent
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as home:
            environment |= {"HOME": home, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
                            "TORCHELASTIC_USE_AGENT_STORE": "True"}
            processes = [subprocess.Popen([sys.executable, "-c", LOSS], stdout=subprocess.PIPE, text=True,
                                          env=environment | {"RANK": str(rank)}) for rank in range(2)]
            try:
                noticed, killed = (float(process.communicate(timeout=ranks.PATIENCE)[0]) for process in processes)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            self.assertLess(noticed - killed, 30)
            self.assertEqual(list(Path(home).rglob("*trace*")), [])

    def test_misuse_leaves_the_group_usable(self) -> None:
        self.assertEqual(ranks.run(misuse, self.backend, 3), [([], True)] * 3)

    def test_timeout(self) -> None:
        text, culprits, operation, _ = ranks.run(come_too_late, self.backend, 2)[0]
        self.assertRegex(text, r"rank 1( on node 1)? did not arrive within the timeout of 5 s")
        self.assertEqual((culprits, operation), ([1], "all_reduce"))

    def test_timeout_of_a_wait(self) -> None:
        (error, first), (_, second) = ranks.run(wait_twice, self.backend, 2)
        self.assertIn("not complete after 200 ms", error[0])
        self.assert_same([first, second], [torch.full((10,), 2.0)] * 2)

    def test_timeout_of_a_message(self) -> None:
        text, culprits, operation, _ = ranks.run(receive_nothing, self.backend, 2)[0]
        self.assertRegex(text, r"rank 1( on node 1)? did not send to rank 0( on node 0)? within the "
                               r"timeout of 0.3 s")
        self.assertEqual((culprits, operation), ([1], "recv"))

    def test_monitored_barrier_beside_another_call(self) -> None:
        errors = ranks.run(monitored_barrier_beside_all_reduce, self.backend, 3)
        for text, culprits, _, _ in errors:
            self.assertIn("ranks 0 and 2 called all_reduce of 10 float32, rank 1 monitored_barrier; call 1", text)
            self.assertEqual(culprits, [1])

    def test_monitored_barrier(self) -> None:
        text, culprits, operation, _ = ranks.run(miss_a_monitored_barrier, self.backend, 3)[0]
        self.assertIn("Ranks 1 failed to pass monitoredBarrier in 5000 ms", text)  # as Gloo says it
        self.assertEqual((culprits, operation), ([1], "monitored_barrier"))

    def test_flight_recorder(self) -> None:
        (entries, files), (entries_of_other, _) = ranks.run(hang, self.backend, 2)
        last = entries[-1]
        self.assertEqual((last["profiling_name"], last["input_sizes"]), ("paceline:all_reduce", [[7, 3]]))
        self.assertNotEqual(last["state"], "completed")
        self.assertTrue(entries_of_other)
        for entry in entries[:-1] + entries_of_other:
            self.assertEqual(entry["state"], "completed", entry)
        self.assertEqual(len(entries), len(entries_of_other) + 1)
        self.assertEqual([entry["profiling_name"] for entry in files[0]], [entry["profiling_name"] for entry in entries])
        self.assertNotEqual(files[0][-1]["state"], "completed")


if __name__ == "__main__":
    unittest.main()
