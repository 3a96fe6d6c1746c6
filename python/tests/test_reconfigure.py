#!/usr/bin/env python3
"""Groups whose ranks change: enable_reconfigure."""

import os
import signal
import threading
import time
import unittest
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import ranks
from test_failures import failure, store

Result = tuple[int, int, float]


def handles(name: str, own: int, members: Iterable[int]) -> list[str]:
    """The handles of the processes `members`, which all call it; `own` is this one's number."""
    store().set(f"{name} {own}", dist._get_reconfigure_handle())
    return [store().get(f"{name} {member}").decode() for member in members]


def all_arrive(name: str, own: int, members: Iterable[int]) -> None:
    store().set(f"{name} {own}", "")
    for member in members:
        store().get(f"{name} {member}")


def form(uuid: int, own: int, members: list[int], timeout: float | None = None) -> None:
    """Makes `members` the ranks of the group, in this order."""
    limit = None if timeout is None else timedelta(seconds=timeout)
    dist._reconfigure(uuid, handles(str(uuid), own, members), timeout=limit).wait()


def outcome(own: int) -> Result:
    tensor = torch.full((1000,), 10.0**own)
    dist.all_reduce(tensor)
    return dist.get_rank(), dist.get_world_size(), tensor[7].item()


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    import paceline

    try:
        function(*arguments, **named)
    except paceline.UsageError as error:
        return str(error)
    raise AssertionError("no error")


def change_ranks() -> list[Result]:
    own, size = dist.get_rank(), dist.get_world_size()
    everybody = list(range(size))
    results = []
    for step, members in enumerate(([own], everybody, everybody[::-1], everybody[:1], everybody[1:], everybody)):
        if own in members:
            form(1000 * step + (own if members == [own] else 0), own, members)
            results.append(outcome(own))
            tensor = torch.full((3,), float(own))
            dist.broadcast(tensor, group_src=dist.get_world_size() - 1)
            results.append((0, 0, tensor[0].item()))
            if dist.get_world_size() > 1:
                to, source = (dist.get_rank() + 1) % dist.get_world_size(), (dist.get_rank() - 1) % dist.get_world_size()
                work = dist.isend(tensor + own, to)
                dist.recv(tensor, source)
                work.wait()
                results.append((0, 0, tensor[0].item()))
    return results


def keep_order() -> list[Result]:
    """A set has no order: ranks keep theirs."""
    own = dist.get_rank()
    members = [2, 0, 1]
    form(1, own, members)
    dist._reconfigure(2, set(handles("2", own, members))).wait()
    return [outcome(own)]


def lose_a_rank_and_replace_it() -> list[Any]:
    """Process 1 of three is killed in a call, process 3 takes its place."""
    own, first, second = dist.get_rank(), [0, 1, 2], [0, 3, 2]
    results: list[Any] = []
    if own in first:
        form(1, own, first)
        if own == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        text, lost, _, _ = failure(dist.all_reduce, torch.ones(1 << 20))
        results.append((text, lost))
        results.append(dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).get_error().name)
    form(2, own, second)
    return [*results, outcome(own)]


def abort() -> list[Any]:
    """Rank 0 aborts while the others wait for it, then all go on."""
    own, members = dist.get_rank(), [0, 1, 2]
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    form(1, own, members)
    results: list[Any] = []
    if own == 0:
        for member in (1, 2):
            store().get(f"waiting {member}")
        backend.abort()
        results.append(backend.get_error().name)
        results.append(refusal(dist.barrier))
    else:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        store().set(f"waiting {own}", "")
        text, lost, _, _ = failure(work.wait)
        results.append((text, lost))
    form(2, own, members)
    return [*results, outcome(own)]


def leave_a_call_behind() -> list[Any]:
    """Calls that are under way, or queued, end with an error when their rank reconfigures."""
    own, members = dist.get_rank(), [0, 1]
    form(1, own, members)
    errors: list[str] = []
    if own == 0:
        works = [dist.all_reduce(torch.ones(10), async_op=True), dist.barrier(async_op=True)]
        form(2, own, members)
        errors = [failure(work.wait)[0] for work in works]
    else:
        form(2, own, members)
    return [errors, outcome(own)]


def misuse() -> list[str]:
    own, size = dist.get_rank(), dist.get_world_size()
    everybody = list(range(size))
    first = handles("first", own, everybody)
    results = [refusal(dist.all_reduce, torch.ones(1)), refusal(dist._reconfigure, 1, []),
               refusal(dist._reconfigure, 1, [first[own], first[own]]), refusal(dist._reconfigure, 1, [first[1 - own]]),
               refusal(dist._reconfigure, 1, first, hints={"fast": "yes"}),
               refusal(dist._reconfigure, 1, first, timeout=timedelta(0))]
    elsewhere = first[1 - own].split(",")
    elsewhere[4] = "machine"
    results.append(refusal(dist._reconfigure, 1, [first[own], ",".join(elsewhere)]))
    for text in ("", "nonsense", first[own] + ",", first[own].replace("paceline", "gloo"), "paceline,1,2,a,b,",
                 "paceline,-1,2,a,b,c", "paceline,0,0,a,b,c", "\x1b[31m" + 2000 * "\u00e9"):
        results.append(refusal(dist._reconfigure, 1, [first[own], text]))
        results.append(refusal(dist._reconfigure, 1, {first[own], text}))
    dist._reconfigure(1, first).wait()  # the misuse has changed nothing
    results.append(refusal(dist._reconfigure, 2, first))
    results.append(refusal(dist._reconfigure, 1, handles("second", own, everybody)))
    results.append(str(outcome(own)))
    return results


def fail_to_form() -> list[Any]:
    """Attempts that fail on all ranks, each with the same cause; the next one works."""
    own, members = dist.get_rank(), [0, 1, 2]
    results: list[Any] = []

    def attempt(name: str, uuid: int, order: list[int] | None = None, seconds: float = 60) -> None:
        given = handles(name, own, members)
        text, named, operation, _ = failure(dist._reconfigure, uuid, [given[i] for i in order or members],
                                            timeout=timedelta(seconds=seconds))
        results.append((text, named, operation))

    attempt("other uuids", 10 + own // 2)
    attempt("other order", 20, [0, 2, 1] if own == 2 else None)
    if own == 1:
        handles("late", own, members)
        store().get("the others gave up")
    else:
        attempt("late", 30, seconds=1)
        all_arrive("gave up", own, [0, 2])
        store().set("the others gave up", "")
    form(40, own, members)
    return [*results, outcome(own)]


def try_again() -> list[Any]:
    """Rank 1 gives an attempt up before rank 0 begins it."""
    own, members = dist.get_rank(), [0, 1]
    given = handles("first", own, members)
    results: list[Any] = []
    if own == 1:
        text, named, _, _ = failure(dist._reconfigure, 1, given, timeout=timedelta(seconds=1))
        results.append((text, named))
    all_arrive("given up", own, members)
    form(2, own, members)
    return [*results, outcome(own)]


def outlive_an_attempt() -> Result:
    """Rank 1 dies in an attempt that nobody else begins."""
    own = dist.get_rank()
    given = handles("first", own, [0, 1, 2])
    if own == 1:
        signal.alarm(1)
        store().set("process", str(os.getpid()))
        dist._reconfigure(1, given)
    status = Path(f"/proc/{int(store().get('process'))}/stat")
    while status.read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.01)
    form(2, own, [0, 2])
    return outcome(own)


def lose_rank_0_with_a_child() -> Any:
    """Rank 0's child has its listener and outlives it."""
    own = dist.get_rank()
    given = handles("first", own, [0, 1])
    if own == 0:
        child = os.fork()
        if child == 0:
            signal.pause()
        store().set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(store().get("child"))
    begin = time.monotonic()
    text, lost, _, _ = failure(dist._reconfigure, 1, given)
    os.kill(child, signal.SIGKILL)
    return text, lost, time.monotonic() - begin


def ask_in_a_child() -> tuple[int, Result]:
    own, members = dist.get_rank(), [0, 1]
    child = os.fork()
    if child == 0:
        refused = [refusal(dist._get_reconfigure_handle), refusal(dist._reconfigure, 1, ["paceline"])]
        os._exit(all("belongs to the parent process" in text for text in refused))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    form(1, own, members)
    return code, outcome(own)


def reconfigure_in_a_callback() -> list[str]:
    """A future's callback asks for another group while its own is left."""
    own, members = dist.get_rank(), [0, 1]
    form(1, own, members)
    texts: list[str] = []
    if own == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        work.get_future().add_done_callback(
            lambda _: texts.append(refusal(dist._reconfigure, 2, [dist._get_reconfigure_handle()])))
        form(3, own, [own])
    return texts


def abort_meanwhile() -> list[Any]:
    own, members = dist.get_rank(), [0, 1]
    given = handles("first", own, members)
    texts: list[str] = []
    if own == 0:
        def attempt() -> None:
            try:
                dist._reconfigure(1, given)
            except dist.DistBackendError as error:
                texts.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        while dist._get_reconfigure_handle() == given[0]:
            time.sleep(0.001)
        dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu")).abort()
        store().set("aborted", "")
        thread.join()
    else:
        store().get("aborted")
        dist._reconfigure(1, given)
        texts.append(failure(dist.barrier)[0])
    form(2, own, members)
    return [texts, outcome(own)]


def leave_a_message_behind() -> tuple[str, float]:
    own = dist.get_rank()
    form(1, own, [0, 1])
    begin = time.monotonic()
    text = ""
    if own == 0:
        work = dist.irecv(torch.ones(10), 1)
        form(2, own, [own])
        try:
            work.wait()
        except (dist.DistBackendError, ValueError) as error:
            text = str(error)
    return text, time.monotonic() - begin


def lose_a_rank_on_the_way(dying: int) -> Any:
    own, members = dist.get_rank(), [0, 1, 2]
    given = handles("first", own, members)
    if own == dying:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    text, lost, _, _ = failure(dist._reconfigure, 1, given)
    seconds = time.monotonic() - begin
    rest = [member for member in members if member != dying]
    form(2, own, rest)
    return text, lost, seconds, outcome(own)


def train(wrapper: str) -> torch.Tensor:
    """Trains on two ranks, then on three."""
    import paceline

    own = dist.get_rank()
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(10, 300), torch.nn.Linear(300, 100))
    wrap = {"torch": torch.nn.parallel.DistributedDataParallel, "paceline": paceline.DistributedDataParallel}[wrapper]
    for uuid, members in ((1, [0, 1]), (2, [2, 0, 1])):
        if own not in members:
            continue
        form(uuid, own, members)
        ddp = wrap(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            generator = torch.Generator().manual_seed(100 * uuid + 10 * step + own)
            optimizer.zero_grad()
            ddp(torch.randn(4, 10, generator=generator)).square().mean().backward()
            optimizer.step()
        del ddp
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def many_times() -> tuple[int, int]:
    own = dist.get_rank()
    counts = []
    for uuid in range(60):
        form(uuid, own, [0, 1])
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        if uuid in (9, 59):
            counts.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return counts[0], counts[1]


class Reconfigure(ranks.Case):
    def test_ranks_change_as_with_gloo(self) -> None:
        self.equals_gloo(change_ranks, reconfigure=True, sizes=(2, 3, 4))

    def test_a_set_of_handles_keeps_the_order_of_ranks(self) -> None:
        results = ranks.run(keep_order, "paceline", 3, reconfigure=True)
        self.assertEqual(results, [[(1, 3, 111.0)], [(2, 3, 111.0)], [(0, 3, 111.0)]])

    def test_a_lost_rank_is_replaced(self) -> None:
        results = ranks.run(lose_a_rank_and_replace_it, "paceline", 4, dying=[1], reconfigure=True)
        for own, rank in ((0, 0), (2, 2)):
            (text, lost), error, after = results[own]
            self.assertRegex(text, "^rank 1 was lost")
            self.assertEqual((lost, error, after), ([1], "REMOTE_ERROR", (rank, 3, 1101.0)))
        self.assertEqual(results[3], [(1, 3, 1101.0)])

    def test_abort_ends_the_group_until_the_next_reconfigure(self) -> None:
        first, *others = ranks.run(abort, "paceline", 3, reconfigure=True)
        self.assertEqual(first[0], "SUCCESS")
        self.assertRegex(first[1], "^barrier on group .*, which has no ranks: .* call reconfigure first")
        for (text, lost), *_ in others:
            self.assertRegex(text, "^rank 0 left the group with an exception: abort was called")
            self.assertEqual(lost, [0])
        self.assertEqual([result[-1] for result in (first, *others)], [(rank, 3, 111.0) for rank in range(3)])

    def test_calls_under_way_do_not_delay_it(self) -> None:
        (errors, first), (none, second) = ranks.run(leave_a_call_behind, "paceline", 2, timeout=200, reconfigure=True)
        self.assertEqual((len(errors), none, first, second), (2, [], (0, 2, 11.0), (1, 2, 11.0)))
        for error in errors:
            self.assertRegex(error, "^rank (0 left the group with an exception: reconfigure was called|1 has left the group)")

    def test_misuse_changes_nothing(self) -> None:
        for own, results in enumerate(ranks.run(misuse, "paceline", 2, reconfigure=True)):
            before, none, twice, stranger, hint, timeout, other, *malformed, stale, used, good = results
            self.assertRegex(before, "^all_reduce on group .*, which has no ranks: .* call reconfigure first")
            self.assertRegex(none, "^reconfigure with 0 handles: a group has from 1 to 64 ranks")
            self.assertRegex(twice, "^reconfigure: handles 0 and 1 are of the same process")
            self.assertRegex(stranger, "own handle is not among the 1 given")
            self.assertRegex(hint, "no hint 'fast'")
            self.assertRegex(timeout, "timeout of 0 ms: it must be positive")
            self.assertRegex(other, "^reconfigure: the process of handle 1 runs on another machine")
            self.assertEqual(len(malformed), 16)
            for text in malformed:
                self.assertRegex(text, "^'.*' ?.*is not a handle of the backend paceline")
                self.assertTrue(text.isascii() and text.isprintable() and len(text) < 250, text)
            self.assertRegex(stale, "own handle is not among the 2 given. A handle serves for one reconfigure")
            self.assertRegex(used, "the uuid 1 was already used")
            self.assertEqual(good, str((own, 2, 11.0)))

    def test_a_failed_attempt_names_its_cause(self) -> None:
        results = ranks.run(fail_to_form, "paceline", 3, reconfigure=True)
        for own, result in enumerate(results):
            for text, named, operation in result[:2]:
                self.assertRegex(text, r"^process \d+ and rank 0 form different groups: their uuids or the handles")
                self.assertEqual((named, operation), ([], "connect"))
            self.assertEqual(result[-1], (own, 3, 111.0))
        for result in (results[0], results[2]):
            text, named, _ = result[2]
            self.assertEqual((text, named), ("rank 1 did not join the group within the timeout of 1 s", [1]))

    def test_a_rank_that_ends_on_the_way_is_named(self) -> None:
        for dying in range(3):
            results = ranks.run(lose_a_rank_on_the_way, "paceline", 3, dying, dying=[dying], reconfigure=True)
            rest = [own for own in range(3) if own != dying]
            for own in rest:
                text, lost, seconds, after = results[own]
                self.assertRegex(text, f"^rank {dying} was lost while the group was being formed")
                self.assertEqual((lost, after), ([dying], (rest.index(own), 2, sum(10.0**member for member in rest))))
                self.assertLess(seconds, 30)

    def test_attempts_of_others_are_not_in_the_way(self) -> None:
        first, ((text, named), second) = ranks.run(try_again, "paceline", 2, reconfigure=True)
        self.assertEqual((text, named), ("rank 0 did not form the group within the timeout of 1 s", [0]))
        self.assertEqual((first, second), ([(0, 2, 11.0)], (1, 2, 11.0)))
        results = ranks.run(outlive_an_attempt, "paceline", 3, dying=[1], reconfigure=True)
        self.assertEqual(results, [(0, 2, 101.0), None, (1, 2, 101.0)])

    def test_forked_children(self) -> None:
        text, lost, seconds = ranks.run(lose_rank_0_with_a_child, "paceline", 2, dying=[0], reconfigure=True)[1]
        self.assertRegex(text, "^rank 0 was lost while the group was being formed")
        self.assertEqual(lost, [0])
        self.assertLess(seconds, 30)
        self.assertEqual(ranks.run(ask_in_a_child, "paceline", 2, reconfigure=True), [(1, (0, 2, 11.0)), (1, (1, 2, 11.0))])

    def test_two_calls_at_once(self) -> None:
        texts, _ = ranks.run(reconfigure_in_a_callback, "paceline", 2, reconfigure=True)
        self.assertEqual(len(texts), 1)
        self.assertRegex(texts[0], "^reconfigure of group .* while another thread does so")

    def test_an_abort_meanwhile_counts(self) -> None:
        ((first,), one), ((second,), two) = ranks.run(abort_meanwhile, "paceline", 2, reconfigure=True)
        self.assertRegex(first, "^reconfigure of group .*: abort was called meanwhile")
        self.assertRegex(second, "^rank 0 left the group with an exception: abort was called")
        self.assertEqual((one, two), ((0, 2, 11.0), (1, 2, 11.0)))

    def test_messages_under_way_do_not_delay_it(self) -> None:
        text, seconds = ranks.run(leave_a_message_behind, "paceline", 2, timeout=200, reconfigure=True)[0]
        self.assertRegex(text, "^rank 0 left the group with an exception: reconfigure was called")
        self.assertLess(seconds, 100)

    def test_models_are_wrapped_anew(self) -> None:
        gloo = ranks.run(train, "gloo", 3, "torch", reconfigure=True)
        for wrapper in ("torch", "paceline"):
            self.assert_same(ranks.run(train, "paceline", 3, wrapper, reconfigure=True), gloo, delta=1e-5)

    def test_it_leaks_neither_descriptors_nor_threads(self) -> None:
        for early, late in ranks.run(many_times, "paceline", 2, reconfigure=True):
            self.assertEqual(early, late)


if __name__ == "__main__":
    unittest.main()
