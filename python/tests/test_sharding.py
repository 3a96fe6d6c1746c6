#!/usr/bin/env python3
"""FSDP2, DTensor, device meshes and distributed checkpoints."""

import tempfile
import unittest

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import ranks

BATCH = 12  # of all ranks; divisible by 1 to 4


def model_of_two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 20), nn.Tanh(), nn.Linear(20, 3))


def sharded(mesh: DeviceMesh) -> nn.Sequential:
    model = model_of_two()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model[2], mesh=mesh)
    return fully_shard(model, mesh=mesh)


def whole(model: nn.Module) -> list[torch.Tensor]:
    return [value.full_tensor() if isinstance(value, DTensor) else value
            for value in map(torch.Tensor.detach, model.parameters())]


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, part: int, parts: int) -> None:
    for step in range(3):
        torch.manual_seed(step)
        inputs = torch.randn(BATCH, 7).chunk(parts)[part]
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def train_whole() -> list[torch.Tensor]:
    model = model_of_two()
    steps(model, optimizer_of(model), 0, 1)
    return whole(model)


def train_sharded() -> list[torch.Tensor]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    steps(model, optimizer_of(model), dist.get_rank(), dist.get_world_size())
    return whole(model)


def train_in_two_dimensions() -> list[torch.Tensor]:
    """Tensor parallel in one dimension, FSDP in the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(model_of_two(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["data"])
    steps(model, optimizer_of(model), mesh.get_local_rank("data"), 2)
    return whole(model)


def train_replicated_shards() -> list[torch.Tensor]:
    """Sharded in one dimension, replicated in the other."""
    model = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    steps(model, optimizer_of(model), dist.get_rank(), 4)
    return whole(model)


def save(directory: str) -> list[torch.Tensor]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model)
    steps(model, optimizer, dist.get_rank(), dist.get_world_size())
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=directory)
    steps(model, optimizer, dist.get_rank(), dist.get_world_size())
    return whole(model)


def load(directory: str) -> list[torch.Tensor]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = optimizer_of(model)
    weights, state = get_state_dict(model, optimizer)
    with torch.no_grad():
        for value in weights.values():
            value.to_local().fill_(-1)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    steps(model, optimizer, dist.get_rank(), dist.get_world_size())
    return whole(model)


def matrix(rows: int, columns: int) -> torch.Tensor:
    return torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)


def redistribute() -> dict[str, torch.Tensor]:
    """Every redistribution between placements, of a matrix that cannot be divided evenly."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results = {}
    placements = {"rows": Shard(0), "columns": Shard(1), "replicate": Replicate()}
    for source, one in placements.items():
        for target, other in placements.items():
            moved = distribute_tensor(matrix(7, 10), mesh, [one]).redistribute(mesh, [other])
            results[f"{source} to {target}"] = moved.full_tensor()
    for target, other in placements.items():
        partial = DTensor.from_local(matrix(7, 10) * (dist.get_rank() + 1), mesh, [Partial()])
        results[f"partial to {target}"] = partial.redistribute(mesh, [other]).full_tensor()
    return results


def multiply() -> list[torch.Tensor]:
    """A product with its inner dimension sharded, with gradients, and one with its outer dimensions sharded."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    a = distribute_tensor(matrix(5, 12), mesh, [Shard(1)]).requires_grad_()
    b = distribute_tensor(matrix(12, 6), mesh, [Shard(0)]).requires_grad_()
    product = a @ b
    product.sum().backward()
    rows = distribute_tensor(matrix(5, 12), mesh, [Shard(0)]) @ distribute_tensor(matrix(12, 6), mesh, [Replicate()])
    return [tensor.full_tensor() for tensor in (product.detach(), a.grad, b.grad, rows)]


def multiply_alone() -> list[torch.Tensor]:
    a, b = matrix(5, 12).requires_grad_(), matrix(12, 6).requires_grad_()
    (a @ b).sum().backward()
    return [(a @ b).detach(), a.grad, b.grad, (a @ b).detach()]


def use_a_mesh() -> list[torch.Tensor]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
    tensor = distribute_tensor(matrix(6, 10), mesh, [Shard(0), Shard(1)])
    sums = []
    for name in ("rows", "columns"):
        one = torch.tensor([float(dist.get_rank())])
        dist.all_reduce(one, group=mesh.get_group(name))
        sums.append(one)
    return [tensor.to_local(), tensor.full_tensor(), (tensor @ tensor.t()).full_tensor(), *sums]


class Fsdp(ranks.Case):
    def test_training(self) -> None:
        self.equals_gloo(train_sharded, sizes=(2, 3), delta=1e-6)

    def test_training_is_that_of_one_process(self) -> None:
        expected = ranks.alone(train_whole)
        for size in (1, 2, 4):
            for parameters in ranks.run(train_sharded, self.backend, size):
                self.assert_same(parameters, expected, delta=1e-5)

    def test_two_dimensions(self) -> None:
        expected = ranks.alone(train_whole)
        for train in (train_in_two_dimensions, train_replicated_shards):
            for parameters in ranks.run(train, self.backend, 4):
                self.assert_same(parameters, expected, delta=1e-5)

    def test_checkpoint_of_another_number_of_ranks(self) -> None:
        for writers, readers in ((("paceline", 3), ("paceline", 2)), (("gloo", 2), ("paceline", 3))):
            with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
                expected = ranks.run(save, *writers, directory)[0]
                for parameters in ranks.run(load, *readers, directory):
                    self.assert_same(parameters, expected, delta=1e-5)


class DistributedTensor(ranks.Case):
    def test_redistribution(self) -> None:
        for size in ranks.SIZES:
            for results in ranks.run(redistribute, self.backend, size):
                for name, tensor in results.items():
                    factor = size * (size + 1) / 2 if name.startswith("partial") else 1
                    self.assert_same(tensor, matrix(7, 10) * factor)

    def test_product(self) -> None:
        expected = ranks.alone(multiply_alone)
        for size in (2, 3):
            for results in ranks.run(multiply, self.backend, size):
                self.assert_same(results, expected)

    def test_mesh_of_two_dimensions(self) -> None:
        self.equals_gloo(use_a_mesh, sizes=(4,))


if __name__ == "__main__":
    unittest.main()
