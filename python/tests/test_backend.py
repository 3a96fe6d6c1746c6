#!/usr/bin/env python3
"""The backend under programs of PyTorch's own kind; each result is Gloo's."""

import unittest

import torch
import torch.distributed as dist
from torch import nn

import ranks

SIZES = (1, 2, 3, 4)


def train(steps=5):
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2)),
        bucket_cap_mb=0.001)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        torch.manual_seed(100 * step + dist.get_rank())
        inputs = torch.randn(6, 9)
        sgd.zero_grad()
        model(inputs).pow(2).mean().backward()
        sgd.step()
    return [parameter.detach() for parameter in model.parameters()]


def exchange_objects():
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"rank": dist.get_rank(), "text": "x" * dist.get_rank()})
    sent = [dist.get_rank(), "from"]
    dist.broadcast_object_list(sent, src=dist.get_world_size() - 1)
    return gathered, sent


def average_in_groups():
    size = dist.get_world_size()
    even = dist.new_group(list(range(0, size, 2)))
    tensor = torch.full((1000,), float(dist.get_rank()))
    if dist.get_rank() % 2 == 0:
        dist.all_reduce(tensor, group=even)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True)
    work.wait()
    dist.barrier()
    return tensor


def reduce_a_column():
    table = torch.full((50, 3), float(dist.get_rank()))
    dist.all_reduce(table[:, 1], op=dist.ReduceOp.MAX, async_op=True).wait()
    return table


def disagree():
    try:
        dist.all_reduce(torch.ones(3 + dist.get_rank()))
    except dist.DistBackendError as error:
        return str(error), error.ranks, error.operation
    return None


def name_of_backend():
    return dist.get_backend(), dist.is_backend_available("paceline")


class Backend(unittest.TestCase):
    def equals_gloo(self, function, delta=0):
        for size in SIZES:
            with self.subTest(size=size):
                ours, gloos = (ranks.run(function, name, size) for name in ("paceline", "gloo"))
                torch.testing.assert_close(ours, gloos, rtol=delta, atol=delta)

    def test_ddp(self):
        self.equals_gloo(train, delta=1e-6)

    def test_tensors_that_are_not_contiguous(self):
        for size in SIZES:
            for rank, table in enumerate(ranks.run(reduce_a_column, "paceline", size)):
                expected = torch.full((50, 3), float(rank))
                expected[:, 1] = size - 1
                self.assertTrue(torch.equal(table, expected))

    def test_objects(self):
        for size in SIZES:
            ours, gloos = (ranks.run(exchange_objects, name, size) for name in ("paceline", "gloo"))
            self.assertEqual(ours, gloos)

    def test_groups(self):
        self.equals_gloo(average_in_groups)

    def test_is_found_without_an_import(self):
        for backend in ("paceline", "cpu:paceline"):
            for name, available in ranks.run(name_of_backend, backend, 2):
                self.assertEqual(name, backend)
                self.assertTrue(available)

    def test_a_mismatch_names_the_ranks(self):
        for text, culprits, operation in ranks.run(disagree, "paceline", 2):
            self.assertIn("rank 0 called all_reduce of 3 float32, rank 1 all_reduce of 4 float32", text)
            self.assertEqual(culprits, [0, 1])
            self.assertEqual(operation, "all_reduce")


if __name__ == "__main__":
    unittest.main()
