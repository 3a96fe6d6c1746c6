#!/usr/bin/env python3
"""Collectives of torch.distributed and its functional variants; expected values are computed."""

import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager

import ranks


def world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def part(rank: int, size: int) -> torch.Tensor:
    return torch.arange(4.0 * size).reshape(2 * size, 2) + 100 * rank


def total(size: int) -> torch.Tensor:
    return sum(part(rank, size) for rank in range(size))


def split_of(sender: int, receiver: int) -> int:
    """How many rows one rank sends to another: some are 0, and the two directions differ."""
    return (2 * sender + receiver) % 3


def rows(sender: int, receiver: int) -> torch.Tensor:
    return torch.full((split_of(sender, receiver), 5), 10.0 * sender + receiver)


def reduce_a_column() -> torch.Tensor:
    table = torch.full((50, 3), float(dist.get_rank()))
    dist.all_reduce(table[:, 1], op=dist.ReduceOp.MAX, async_op=True).wait()
    return table


def functional_calls() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mine = part(rank, size)
    sent = [split_of(rank, peer) for peer in range(size)]
    received = [split_of(peer, rank) for peer in range(size)]
    results = [
        functional.all_reduce(mine, "sum", world()),
        functional.all_reduce(mine, "max", world()),
        functional.broadcast(mine, size - 1, world()),
        functional.all_gather_tensor(mine, 0, world()),
        functional.all_gather_tensor(mine, 1, world()),
        functional.reduce_scatter_tensor(mine, "sum", 0, world()),
        functional.all_to_all_single(torch.cat([rows(rank, peer) for peer in range(size)]), received, sent, world()),
        *functional.all_reduce_coalesced([mine, mine + 1], "sum", world()),
        *functional.all_gather_into_tensor_coalesced([mine, mine + 1], world()),
        *functional.reduce_scatter_tensor_coalesced([mine, mine], "sum", [0, 0], world()),
    ]
    return [functional.wait_tensor(result) for result in results]


def expected_of_functional_calls(rank: int, size: int) -> list[torch.Tensor]:
    parts = [part(peer, size) for peer in range(size)]
    reduced = total(size).chunk(size)[rank]
    return [total(size), parts[-1], parts[-1], torch.cat(parts), torch.cat(parts, 1), reduced,
            torch.cat([rows(peer, rank) for peer in range(size)]), total(size), total(size) + size,
            torch.cat(parts), torch.cat(parts) + 1, reduced, reduced]


def functional_gradients() -> list[torch.Tensor]:
    """The gradients through a gather, a scatter and an exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    weight = torch.arange(4.0 * size * size).reshape(2 * size * size, 2) + rank
    gathered = part(rank, size).requires_grad_()
    (functional.all_gather_tensor_autograd(gathered, 0, world()) * weight).sum().backward()
    scattered = part(rank, size).requires_grad_()
    (functional.reduce_scatter_tensor_autograd(scattered, "sum", 0, world()) * (rank + 1)).sum().backward()
    exchanged = part(rank, size).requires_grad_()
    (functional.all_to_all_single_autograd(exchanged, None, None, world()) * (rank + 1)).sum().backward()
    return [gathered.grad, scattered.grad, exchanged.grad]


def coalesced(device: str | None, async_ops: bool) -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = [part(rank, size) + i for i in range(3)]
    gathered = [torch.empty(2 * size * size, 2) for _ in range(2)]
    scattered = [torch.empty(2, 2) for _ in range(2)]
    where = torch.device(device) if device else None
    with _coalescing_manager(device=where, async_ops=async_ops) as first:
        for tensor in sums:
            dist.all_reduce(tensor)
    with _coalescing_manager(device=where, async_ops=async_ops) as second:
        for i, tensor in enumerate(gathered):
            dist.all_gather_into_tensor(tensor, part(rank, size) + i)
    with _coalescing_manager(device=where, async_ops=async_ops) as third:
        for i, tensor in enumerate(scattered):
            dist.reduce_scatter_tensor(tensor, part(rank, size) + i)
    for manager in (first, second, third):
        if async_ops:
            manager.wait()
    return sums + gathered + scattered


def expected_of_coalesced(rank: int, size: int) -> list[torch.Tensor]:
    whole = torch.cat([part(peer, size) for peer in range(size)])
    return ([total(size) + i * size for i in range(3)] + [whole + i for i in range(2)]
            + [total(size).chunk(size)[rank] + i * size for i in range(2)])


def exchange_lists() -> list[torch.Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(split_of(peer, rank), 5) for peer in range(size)]
    dist.all_to_all(received, [rows(rank, peer) for peer in range(size)])
    return received


def expected_of_lists(rank: int, size: int) -> list[torch.Tensor]:
    return [rows(peer, rank) for peer in range(size)]


def gather_and_scatter() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    root = size - 1
    gathered = [torch.empty(2 * size, 2) for _ in range(size)] if rank == root else None
    dist.gather(part(rank, size), gathered, dst=root)
    scattered = torch.empty(2, 2)
    dist.scatter(scattered, list(part(rank, size).chunk(size)) if rank == root else None, src=root)
    reduced = part(rank, size)
    dist.reduce(reduced, dst=root)
    return [gathered, scattered, reduced if rank == root else None]


def overlap() -> list[torch.Tensor]:
    """Many calls under way at once, waited for in reverse order, and one call that nobody waits for."""
    tensors = [torch.full((1000 * i,), float(dist.get_rank() + i)) for i in range(1, 30)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    last = torch.ones(3)
    dist.all_reduce(last)
    for work in reversed(works):
        work.wait()
        assert work.is_completed()
    return tensors + [last]


def types() -> list[torch.Tensor]:
    results = []
    for kind in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT):
            results.append((torch.arange(20) % 5 + dist.get_rank()).to(kind))
            dist.all_reduce(results[-1], op)
    return results


def refusal(function: Any, *arguments: Any) -> str:
    try:
        function(*arguments)
    except ValueError as error:
        return str(error)
    return "no error"


def write_one_place_twice() -> dict[str, str]:
    """The errors of calls whose tensors overlap, by operation."""
    size = dist.get_world_size()
    t = torch.arange(8.0 * size)
    table = torch.zeros(2 * size, 4)
    blocks, halves = list(t.chunk(size)), [table[:, :2], table[:, 1:3]]
    twice = [t[:8]] * size
    calls = {
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([t, t]),
        "all_reduce_coalesced of views": lambda: dist.all_reduce_coalesced([t[:3], t[1:]]),
        "all_reduce_coalesced of columns": lambda: dist.all_reduce_coalesced(halves),
        "all_gather": lambda: dist.all_gather(twice, torch.ones(8)),
        "all_gather of its output": lambda: dist.all_gather(blocks, blocks[dist.get_rank() - 1]),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(t, t[1:9]),
        "gather": lambda: dist.gather(torch.ones(8), twice if dist.get_rank() == 0 else None),
        "scatter": lambda: dist.scatter(t[4:12], blocks if dist.get_rank() == 0 else None),
        "reduce_scatter": lambda: dist.reduce_scatter(t[4:12], blocks),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(t[4:12], t),
        "all_to_all": lambda: dist.all_to_all(twice, [torch.ones(8)] * size),
        "all_to_all_single": lambda: dist.all_to_all_single(t, t),
    }
    here = ("gather", "scatter") if dist.get_rank() != 0 else ()
    return {name: refusal(call) for name, call in calls.items() if name not in here}


def write_in_place() -> list[torch.Tensor]:
    """A rank's own part may be in place already; columns of one table do not overlap."""
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.zeros(2 * size, 2) for _ in range(3)]
    lists = [list(tensor.chunk(size)) for tensor in gathered]
    mine = [parts[rank].fill_(rank + 1) for parts in lists]
    dist.all_gather(lists[0], mine[0])
    dist.all_gather_into_tensor(gathered[1], mine[1])
    dist.gather(mine[2], lists[2] if rank == 0 else None)
    scattered, reduced, listed = (part(rank, size) for _ in range(3))
    dist.scatter(scattered[:2], list(scattered.chunk(size)) if rank == 0 else None)
    dist.reduce_scatter_tensor(reduced.chunk(size)[rank], reduced)
    dist.reduce_scatter(listed.chunk(size)[rank], list(listed.chunk(size)))
    table = torch.full((4, 2 * size), float(rank))
    dist.all_gather([table[:, 2 * peer:2 * peer + 2] for peer in range(size)], torch.full((4, 2), rank + 1.0))
    dist.all_reduce_coalesced([table[:, 0], table[:, 1]])
    return [*gathered[:2], *(gathered[2:] if rank == 0 else []), scattered[:2], reduced.chunk(size)[rank],
            listed.chunk(size)[rank], table]


def expected_of_writing_in_place(rank: int, size: int) -> list[torch.Tensor]:
    whole = torch.cat([torch.full((2, 2), peer + 1.0) for peer in range(size)])
    table = torch.cat([torch.full((4, 2), peer + 1.0) for peer in range(size)], 1)
    table[:, :2] = size
    reduced = total(size).chunk(size)[rank]
    return [*[whole] * (3 if rank == 0 else 2), part(0, size).chunk(size)[rank], reduced, reduced, table]


def reduce_an_expanded_tensor() -> tuple[str, torch.Tensor]:
    base = torch.ones(8)
    return refusal(dist.all_reduce, base[:1].expand(5)), base


INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


def numbers(kind: torch.dtype, rank: int) -> list[int]:
    """Values for each reduction: of both signs if the type has them, with sums that the type can hold."""
    lowest = 0 if kind == torch.uint8 else -30
    return [lowest + (7 * i + 5 * rank) % 31 for i in range(40_000)]


def averages() -> list[torch.Tensor]:
    results = []
    for kind in INTEGERS:
        for count in (20, 40_000):
            results.append(torch.tensor(numbers(kind, dist.get_rank())[:count], dtype=kind))
            dist.all_reduce(results[-1], dist.ReduceOp.AVG)
    return results


def expected_of_averages(rank: int, size: int) -> list[torch.Tensor]:
    results = []
    for kind in INTEGERS:
        sums = map(sum, zip(*(numbers(kind, peer) for peer in range(size))))
        truncated = [abs(one) // size * (1 if one > 0 else -1) for one in sums]
        results += [torch.tensor(truncated[:count], dtype=kind) for count in (20, 40_000)]
    return results


def average_of_bools() -> str:
    return refusal(dist.all_reduce, torch.tensor([True]), dist.ReduceOp.AVG)


class Collectives(ranks.Case):
    def equals(self, function: Any, expected: Any, *arguments: Any) -> None:
        for size in ranks.SIZES:
            with self.subTest(size=size):
                for rank, results in enumerate(ranks.run(function, self.backend, size, *arguments)):
                    self.assert_same(results, expected(rank, size))

    def test_functional(self) -> None:
        self.equals(functional_calls, expected_of_functional_calls)

    def test_functional_gradients(self) -> None:
        self.equals_gloo(functional_gradients, sizes=(1, 2, 3))

    def test_coalescing(self) -> None:
        for device in (None, "cpu"):
            for async_ops in (False, True):
                with self.subTest(device=device, async_ops=async_ops):
                    self.equals(coalesced, expected_of_coalesced, device, async_ops)

    def test_lists_of_different_sizes(self) -> None:
        self.equals(exchange_lists, expected_of_lists)

    def test_roots(self) -> None:
        self.equals_gloo(gather_and_scatter)

    def test_overlap(self) -> None:
        self.equals_gloo(overlap, sizes=(1, 3))

    def test_types(self) -> None:
        self.equals_gloo(types, sizes=(1, 2, 4))

    def test_averages_of_integers_are_truncated(self) -> None:
        self.equals(averages, expected_of_averages)

    def test_averages_of_bools_are_refused(self) -> None:
        self.assertEqual(ranks.run(average_of_bools, self.backend, 1), [
            "all_reduce of Bool with AVG: the average of bools is not a bool; convert the tensor to a floating type, "
            "or reduce it with MIN or MAX"])

    def test_overlapping_outputs_are_refused(self) -> None:
        for size in (2, 3):
            for told in ranks.run(write_one_place_twice, self.backend, size):
                for name, text in told.items():
                    with self.subTest(size=size, call=name):
                        self.assertRegex(text, f"^{name.split()[0]} writes a tensor of .* that shares memory with")

    def test_parts_may_be_in_place(self) -> None:
        self.equals(write_in_place, expected_of_writing_in_place)

    def test_an_expanded_tensor_is_refused(self) -> None:
        # Gloo writes five elements from the one address on, past the end of the tensor.
        for text, base in ranks.run(reduce_an_expanded_tensor, self.backend, 2):
            self.assertIn("whose elements share memory, as after expand()", text)
            self.assert_same(base, torch.ones(8))

    def test_tensors_that_are_not_contiguous(self) -> None:
        def expected(rank: int, size: int) -> torch.Tensor:
            table = torch.full((50, 3), float(rank))
            table[:, 1] = size - 1
            return table

        self.equals(reduce_a_column, expected)


if __name__ == "__main__":
    unittest.main()
