#!/usr/bin/env python3
"""Threads, signals, forks and the end of a group in the process of a rank."""

import os
import signal
import sys
import threading
import unittest
from collections.abc import Callable
from types import CodeType

import torch
import torch.distributed as dist

import ranks


def store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()


def works() -> bool:
    one = torch.ones(10)
    dist.all_reduce(one)
    return torch.equal(one, torch.full((10,), float(dist.get_world_size())))


BLOCKING: dict[str, Callable[[], object]] = {
    "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
    "all_reduce of 8 MB": lambda: dist.all_reduce(torch.ones(2_000_000)),
    "wait": lambda: dist.all_reduce(torch.ones(10), async_op=True).wait(),
    "future": lambda: dist.all_reduce(torch.ones(10), async_op=True).get_future().wait(),
    "barrier": dist.barrier,
    "monitored_barrier": dist.monitored_barrier,
    "recv": lambda: dist.recv(torch.ones(10), 1) if dist.get_rank() == 0 else dist.send(torch.ones(10), 0),
    "new_group": dist.new_group,
}


def while_main_thread_waits(action: Callable[[], None]) -> threading.Thread:
    """Runs the action on another thread once the main thread blocks in a call of BLOCKING."""
    main = threading.main_thread().ident

    def position() -> tuple[CodeType, int]:
        frame = sys._current_frames()[main]
        return frame.f_code, frame.f_lasti

    def in_call(code: CodeType) -> bool:
        return code.co_name == "<lambda>" or code.co_filename not in (__file__, threading.__file__)

    def watch() -> None:
        unchanged, last = 0, position()
        while unchanged < 1000 or not in_call(last[0]):
            os.sched_yield()
            here = position()
            unchanged, last = (unchanged + 1, last) if here == last else (0, here)
        action()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def run_threads() -> list[str]:
    """Rank 1 joins each call only after another thread of rank 0 has run Python during it."""
    done = []
    for name, call in BLOCKING.items():
        if dist.get_rank() == 0:
            thread = while_main_thread_waits(lambda key=name: store().set(key, ""))
            call()
            thread.join()
        else:
            store().wait([name])
            call()
        done.append(name)
    return done


def interrupt() -> tuple[bool, bool]:
    """A signal arrives while the main thread waits: its handler runs after the call, and the group goes on."""
    interrupted = False
    if dist.get_rank() == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        group = dist.distributed_c10d._get_default_group()
        before = group._get_sequence_number_for_group()

        def act_within_call() -> None:
            while group._get_sequence_number_for_group() == before:
                os.sched_yield()
            os.kill(os.getpid(), signal.SIGINT)
            store().set("interrupted", "")

        thread = threading.Thread(target=act_within_call)
        thread.start()
        try:
            dist.all_reduce(torch.ones(10))
            thread.join()
        except KeyboardInterrupt:
            interrupted = True
        thread.join()
    else:
        store().wait(["interrupted"])
        dist.all_reduce(torch.ones(10))
    return interrupted, works()


def leave_with_work_under_way(together: bool) -> bool:
    """Rank 0 leaves a group while its call waits for rank 1, which leaves at the same time or later."""
    group = dist.new_group()
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(10), group=group, async_op=True)
        dist.irecv(torch.ones(10), 1, group=group)
        store().set("under way", "")
        if not together:
            group.abort()
        dist.destroy_process_group(group)
        store().set("left", "")
    store().wait(["under way" if together else "left"])
    if dist.get_rank() == 1:
        dist.destroy_process_group(group)
    return works()


def join_a_call_of_one_who_leaves() -> float:
    """Rank 0 leaves a group during its last call, which rank 1 joins only then."""
    group = dist.new_group()
    tensor = torch.ones(10)
    if dist.get_rank() == 0:
        dist.all_reduce(tensor, group=group, async_op=True)
        store().set("called", "")
        dist.destroy_process_group(group)
    else:
        store().wait(["called"])
        dist.all_reduce(tensor, group=group)
    return tensor[0].item()


def leave_with_a_callback_under_way() -> bool:
    """The callback needs the GIL while the main thread destroys the group."""
    called = []
    group = dist.new_group()
    tensor = torch.ones(10)
    future = dist.all_reduce(tensor, group=group, async_op=True).get_future()
    future = future.then(lambda done: called.append(sum(range(100_000))))
    dist.destroy_process_group(group)
    future.wait()
    return len(called) == 1 and works()


def in_child(function: Callable[[], bool]) -> bool:
    """The result of the function in a forked child, which then ends."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if function() else 2
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def refused() -> bool:
    calls = (lambda: dist.all_reduce(torch.ones(10)), lambda: dist.all_reduce(torch.ones(10), async_op=True), dist.barrier,
             lambda: dist.send(torch.ones(10), 1 - dist.get_rank()), dist.monitored_barrier)
    for call in calls:
        try:
            call()
            return False
        except ValueError:
            pass
    return True


def destroyed() -> bool:
    dist.destroy_process_group()
    return True


def fork() -> tuple[list[bool], bool]:
    """Forks before and after the group has threads, and with a call under way."""
    tensor = torch.ones(10)
    told = [in_child(refused), in_child(destroyed)]
    dist.all_reduce(tensor, async_op=True).wait()
    told += [in_child(refused), in_child(destroyed)]
    work = dist.all_reduce(tensor, async_op=True) if dist.get_rank() == 0 else None
    told += [in_child(refused), in_child(destroyed)]
    (work.wait if work else lambda: dist.all_reduce(tensor))()
    return told, torch.equal(tensor, torch.full((10,), 4.0)) and works()


class Processes(ranks.Case):
    def test_other_threads_run(self) -> None:
        self.assertEqual(ranks.run(run_threads, "paceline", 2), [list(BLOCKING)] * 2)

    def test_interrupt(self) -> None:
        self.assertEqual(ranks.run(interrupt, "paceline", 2), [(True, True), (False, True)])

    def test_leaving_with_work_under_way(self) -> None:
        for together in (True, False):
            with self.subTest(together=together):
                self.assertEqual(ranks.run(leave_with_work_under_way, "paceline", 2, together), [True] * 2)

    def test_leaving_completes_calls_under_way(self) -> None:
        self.assertEqual(ranks.run(join_a_call_of_one_who_leaves, "paceline", 2), [2.0] * 2)

    def test_leaving_with_a_callback_under_way(self) -> None:
        self.assertEqual(ranks.run(leave_with_a_callback_under_way, "paceline", 2), [True] * 2)

    def test_forks(self) -> None:
        self.assertEqual(ranks.run(fork, "paceline", 2), [([True] * 6, True)] * 2)


if __name__ == "__main__":
    unittest.main()
