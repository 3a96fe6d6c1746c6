"""Runs a function as several ranks, each a process with a process group of its own, and compares backends.

Ranks are forked, so this process imports everything that they need, and computes with one thread only.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import tempfile
import time
import traceback
import unittest
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # otherwise every rank would import it for DistributedDataParallel or FSDP
import torch.distributed as dist

SIZES = (1, 2, 3, 4)
# The backend paceline in a world on two nodes: the second half of the ranks says that it runs on another.
TWO_NODES = "paceline on two nodes"
PATIENCE = 300.0  # seconds for a function; longer than any deadline in it

torch.set_num_threads(1)

# If the last reference to a Gloo group is dropped in a future's callback on the group's own thread, Gloo aborts the process.
_kept: list[Any] = []


def _pretend_nodes(rank: int, size: int) -> None:
    first = (size + 1) // 2
    node, local_rank, local_size = (0, rank, first) if rank < first else (1, rank - first, size - first)
    os.environ.update({name: str(value) for name, value in {
        "RANK": rank, "WORLD_SIZE": size, "GROUP_RANK": node, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_size}.items()})


def _rank(rank: int, function: Callable[..., Any], backend: str, size: int, directory: str, timeout: float, reconfigure: bool,
          arguments: tuple[Any, ...], sender: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)  # again: a forked child creates its thread pool anew, and autograd's threads would race to do it
    os.dup2(os.open(os.path.join(directory, f"said by {rank}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = os.path.join(directory, "trace")
    if backend == TWO_NODES:
        _pretend_nodes(rank, size)
        backend = "paceline"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=size,
                            timeout=timedelta(seconds=timeout), enable_reconfigure=reconfigure)
    if backend == "gloo":
        _kept.append(dist.group.WORLD)
    try:
        result, error = function(*arguments), None
    except BaseException:
        result, error = None, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    # As bytes: a tensor would be sent as shared memory, which ends with its sender.
    sender.send_bytes(pickle.dumps((result, error)))


def run(function: Callable[..., Any], backend: str, size: int, *arguments: Any, timeout: float = 60,
        dying: Iterable[int] = (), reconfigure: bool = False) -> list[Any]:
    """The results of `function(*arguments)` on each rank; None for ranks in `dying`, which end without a result.

    Raises AssertionError with the errors of the ranks. `timeout` is the group's, in seconds; `reconfigure` is for its
    enable_reconfigure.
    """
    context = multiprocessing.get_context("fork")
    results: list[Any] = [None] * size
    complaints = []
    with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
        processes, receivers = [], []
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank, args=(rank, function, backend, size, directory, timeout, reconfigure, arguments, sender))
                process.start()
                sender.close()
                processes.append(process)
                receivers.append(receiver)
            deadline = time.monotonic() + PATIENCE

            def complain(rank: int, what: str) -> None:
                said = Path(directory, f"said by {rank}")
                complaints.append(f"rank {rank}: {what}\n{said.read_text()[-3000:] if said.exists() else ''}")

            for rank, receiver in enumerate(receivers):
                if not receiver.poll(max(deadline - time.monotonic(), 0)):
                    complain(rank, "it hangs")
                    continue
                try:
                    results[rank], error = pickle.loads(receiver.recv_bytes())
                except EOFError:
                    error = None if rank in dying else "it ended without a result"
                if error:
                    complain(rank, error)
                processes[rank].join(max(deadline - time.monotonic(), 0))
                if processes[rank].exitcode != 0 and rank not in dying:
                    complain(rank, f"its process ended with {processes[rank].exitcode}")
        finally:
            for process in processes:
                process.kill()
                process.join()
            for receiver in receivers:
                receiver.close()
    if complaints:
        raise AssertionError(f"{function.__name__} with {size} ranks on {backend}:\n" + "\n".join(complaints))
    return results


def alone(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `function(*arguments)` in a process of its own, with a group of one, over Gloo."""
    return run(function, "gloo", 1, *arguments)[0]


class Case(unittest.TestCase):
    backend = "paceline"

    def assert_same(self, got: Any, expected: Any, delta: float = 0) -> None:
        """Compares tensors in lists, tuples and dicts by their values, everything else by ==."""
        if isinstance(expected, torch.Tensor):
            torch.testing.assert_close(got, expected, rtol=delta, atol=delta)
        elif isinstance(expected, (list, tuple)):
            self.assertEqual(len(got), len(expected))
            for one, other in zip(got, expected):
                self.assert_same(one, other, delta)
        elif isinstance(expected, dict):
            self.assertEqual(list(got), list(expected))
            self.assert_same(list(got.values()), list(expected.values()), delta)
        else:
            self.assertEqual(got, expected)

    def equals_gloo(self, function: Callable[..., Any], *arguments: Any, sizes: Iterable[int] = SIZES,
                    delta: float = 0, reconfigure: bool = False) -> None:
        for size in sizes:
            with self.subTest(function=function.__name__, size=size):
                self.assert_same(*(run(function, backend, size, *arguments, reconfigure=reconfigure)
                                   for backend in (self.backend, "gloo")), delta)
