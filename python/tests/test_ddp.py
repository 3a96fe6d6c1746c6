#!/usr/bin/env python3
"""DistributedDataParallel in its variants; after some steps, parameters equal those with Gloo."""

import os
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ranks


class Branches(nn.Module):
    """A trunk and two heads; each forward uses one of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(40, 2), nn.Linear(40, 2)])

    def forward(self, inputs: torch.Tensor, head: int) -> torch.Tensor:
        return self.heads[head](self.trunk(inputs))


def inputs_of(step: int) -> torch.Tensor:
    torch.manual_seed(100 * step + dist.get_rank())
    return torch.randn(6, 9)


def parameters_of(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def train(hook: Any = None, state: Any = None, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2)),
        bucket_cap_mb=0.001, **options)
    if hook:
        model.register_comm_hook(state() if callable(state) else state, hook)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        sgd.zero_grad()
        model(inputs_of(step)).pow(2).mean().backward()
        sgd.step()
    return parameters_of(model)


def train_viewing() -> list[torch.Tensor]:
    return train(gradient_as_bucket_view=True)


def train_with_a_chain() -> list[torch.Tensor]:
    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return averaged.then(lambda future: future.value()[0] * 2).then(lambda future: future.value() / 2)

    return train(hook)


def train_in_half_precision() -> list[torch.Tensor]:
    return train(default_hooks.fp16_compress_hook)


def train_with_power_sgd() -> list[torch.Tensor]:
    return train(powerSGD_hook.powerSGD_hook,
                 lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5))


def train_branches(static: bool) -> list[torch.Tensor]:
    """Ranks use different heads in each step, or, with a static graph, always the same head."""
    torch.manual_seed(0)
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001, find_unused_parameters=not static,
                                    static_graph=static)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        sgd.zero_grad(set_to_none=False)
        model(inputs_of(step), 0 if static else (step + dist.get_rank()) % 2).pow(2).mean().backward()
        sgd.step()
    return parameters_of(model)


def memory_of_buckets(disabled: str | None) -> tuple[int, int]:
    """The memory that the backend has allocated for a model, and the size of its parameters."""
    os.environ.pop("DDP_DISABLE_COMM_MEM", None)
    if disabled is not None:
        os.environ["DDP_DISABLE_COMM_MEM"] = disabled
    group = dist.new_group()
    model = DistributedDataParallel(nn.Linear(300, 200), process_group=group)
    for step in range(3):  # buckets are rebuilt after the first
        model(torch.ones(4, 300)).sum().backward()
    handed_out = group._get_backend(torch.device("cpu")).memory_stats()["allocated_bytes"]
    return handed_out, sum(parameter.nbytes for parameter in model.parameters())


def accumulate() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 2))
    with model.no_sync():
        model(inputs_of(0)).sum().backward()
    model(inputs_of(1)).pow(2).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def train_unevenly() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(9, 2))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    with model.join():
        for step in range(2 + 2 * dist.get_rank()):
            sgd.zero_grad()
            model(inputs_of(step)).pow(2).mean().backward()
            sgd.step()
    return parameters_of(model)


def train_from_a_loader() -> list[torch.Tensor]:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 9), torch.randn(24, 2))
    loader = DataLoader(data, batch_size=3, sampler=DistributedSampler(data), num_workers=1)
    model = DistributedDataParallel(nn.Linear(9, 2))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for inputs, targets in loader:
        sgd.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        sgd.step()
    return parameters_of(model)


class Training(ranks.Case):
    def test_plain(self) -> None:
        self.equals_gloo(train, delta=1e-6)

    def test_gradients_as_views_of_buckets(self) -> None:
        self.equals_gloo(train_viewing, sizes=(2, 3), delta=1e-6)

    def test_unused_parameters(self) -> None:
        self.equals_gloo(train_branches, False, sizes=(1, 2, 3), delta=1e-6)

    def test_static_graph(self) -> None:
        self.equals_gloo(train_branches, True, sizes=(2, 3), delta=1e-6)

    def test_hook_that_chains_futures(self) -> None:
        self.equals_gloo(train_with_a_chain, sizes=(2, 3), delta=1e-6)

    def test_hook_in_half_precision(self) -> None:
        self.equals_gloo(train_in_half_precision, sizes=(2,), delta=1e-4)

    def test_power_sgd(self) -> None:
        self.equals_gloo(train_with_power_sgd, sizes=(2, 3), delta=1e-4)

    def test_buckets_are_in_shared_memory(self) -> None:
        for handed_out, parameters in ranks.run(memory_of_buckets, self.backend, 2, None):
            self.assertGreaterEqual(handed_out, parameters)
        for handed_out, _ in ranks.run(memory_of_buckets, self.backend, 2, "1"):
            self.assertEqual(handed_out, 0)

    def test_accumulation(self) -> None:
        self.equals_gloo(accumulate, sizes=(2, 3), delta=1e-5)

    def test_uneven_inputs(self) -> None:
        self.equals_gloo(train_unevenly, sizes=(2, 3), delta=1e-6)

    def test_data_loader_with_workers(self) -> None:
        self.equals_gloo(train_from_a_loader, sizes=(2,), delta=1e-6)


if __name__ == "__main__":
    unittest.main()
