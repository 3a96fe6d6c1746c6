#!/usr/bin/env python3
"""Groups, their options, and the memory that they allocate."""

import tempfile
import unittest
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import ranks


def sum_in(group: dist.ProcessGroup | None) -> float:
    tensor = torch.tensor([1.0 + dist.get_rank()])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def backend_of(group: dist.ProcessGroup | None = None) -> Any:
    return (group or dist.distributed_c10d._get_default_group())._get_backend(torch.device("cpu"))


def use_groups() -> list[Any]:
    """Groups that overlap, one that only its members form, and one that is destroyed while others go on."""
    rank, size = dist.get_rank(), dist.get_world_size()
    even = dist.new_group(list(range(0, size, 2)))
    low = dist.new_group(list(range((size + 1) // 2)), timeout=timedelta(seconds=30))
    results: list[Any] = []
    for group in (even, low):
        if dist.get_group_rank(dist.group.WORLD, rank) in dist.get_process_group_ranks(group):
            results.append((sum_in(group), dist.get_rank(group), dist.get_process_group_ranks(group)))
    if rank == size - 1:
        results.append(sum_in(dist.new_group([rank], use_local_synchronization=True)))
    if rank % 2 == 0:
        dist.destroy_process_group(even)
    dist.barrier()
    return results + [sum_in(None)]


def split() -> list[Any]:
    """Splits in a given order, one that leaves ranks out, and a split of a split."""
    pairs = dist.split_group(split_ranks=[[1, 0], [2, 3]], group_desc="pairs")
    some = dist.split_group(split_ranks=[[0, 3]])
    one = dist.split_group(pairs, split_ranks=[[0], [1]])
    result = [dist.get_rank(pairs), dist.get_backend(pairs), sum_in(pairs), sum_in(one)]
    if some is not dist.GroupMember.NON_GROUP_MEMBER:
        result.append(sum_in(some))
    return result


def group_with_options(staging_bytes: int) -> tuple[list[tuple[int, int]], torch.Tensor, torch.Tensor]:
    import paceline

    options = paceline.Options()
    options.staging_bytes = staging_bytes
    options.single_copy_bytes = 1 << 16
    group = dist.new_group(pg_options=options)
    tensor = torch.arange(1_000_000.0)
    dist.all_reduce(tensor, group=group)
    child = dist.split_group(group, split_ranks=[list(range(dist.get_world_size()))])
    part = torch.zeros(100_000)
    parts = [torch.full_like(part, to) for to in range(dist.get_world_size())]
    dist.scatter(part, parts if dist.get_rank() == 0 else None, group=child)
    of_groups = [backend_of(one).options for one in (group, child)]
    return [(one.staging_bytes, one.single_copy_bytes) for one in of_groups], tensor, part


def group_with_other_options() -> str:
    import paceline

    try:
        dist.new_group(pg_options={"staging_bytes": 1})  # type: ignore[arg-type]
    except paceline.UsageError as error:
        return str(error)
    return "no error"


def reduce_in_allocated_memory() -> tuple[torch.Tensor, torch.Tensor]:
    backend, cpu = backend_of(), torch.device("cpu")
    assert backend.supports_tensor_alloc(cpu)
    tensor = backend.allocate_tensor(100_000, dtype=torch.float64, device=cpu)
    tensor.fill_(dist.get_rank() + 1)
    dist.all_reduce(tensor)
    copy = tensor.clone()
    dist.destroy_process_group()
    return copy, tensor  # the tensor outlives its group


def name_of_backend() -> tuple[str, bool]:
    return dist.get_backend(), dist.is_backend_available("paceline")


def start_again(path_of_store: str) -> list[float]:
    """The same processes leave the world and form a new one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    sums = [sum_in(None)]
    for attempt in range(3):
        dist.destroy_process_group()
        dist.init_process_group("paceline", init_method=f"file://{path_of_store}/{attempt}", rank=rank, world_size=size)
        sums.append(sum_in(None))
    return sums


class Groups(ranks.Case):
    def test_groups(self) -> None:
        self.equals_gloo(use_groups)

    def test_split(self) -> None:
        expected = [[1, "paceline", 3.0, 1.0, 5.0], [0, "paceline", 3.0, 2.0],
                    [0, "paceline", 7.0, 3.0], [1, "paceline", 7.0, 4.0, 5.0]]
        self.assertEqual(ranks.run(split, self.backend, 4), expected)

    def test_options(self) -> None:
        for staging_bytes in (1 << 20, 1 << 24):
            results = ranks.run(group_with_options, self.backend, 3, staging_bytes)
            for rank, (options, tensor, part) in enumerate(results):
                self.assertEqual(options, [(staging_bytes, 1 << 16)] * 2)
                self.assert_same(tensor, torch.arange(1_000_000.0) * 3)
                self.assert_same(part, torch.full((100_000,), float(rank)))

    def test_other_options_are_refused(self) -> None:
        for error in ranks.run(group_with_other_options, self.backend, 2):
            self.assertIn("pg_options is {'staging_bytes': 1}; expected paceline.Options", error)

    def test_memory_that_the_backend_allocates(self) -> None:
        for size in ranks.SIZES:
            expected = torch.full((100_000,), size * (size + 1) / 2, dtype=torch.float64)
            for tensors in ranks.run(reduce_in_allocated_memory, self.backend, size):
                self.assert_same(list(tensors), [expected, expected])

    def test_is_found_without_an_import(self) -> None:
        for backend in ("paceline", "cpu:paceline"):
            self.assertEqual(ranks.run(name_of_backend, backend, 2), [(backend, True)] * 2)

    def test_starting_again(self) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
            self.assertEqual(ranks.run(start_again, self.backend, 3, directory), [[6.0] * 4] * 3)


if __name__ == "__main__":
    unittest.main()
