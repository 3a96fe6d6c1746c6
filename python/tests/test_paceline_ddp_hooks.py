#!/usr/bin/env python3
"""Communication hooks of paceline.DistributedDataParallel, beside PyTorch's class on Gloo."""

import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import ZeroRedundancyOptimizer

import paceline
import ranks
from test_ddp import inputs_of, parameters_of
from test_paceline_ddp import PyTorchs, large, small, step, train, train_large, wrap


def train_with_a_chain() -> list[torch.Tensor]:
    def hook(scale: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        averaged = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True).get_future()
        return averaged.then(lambda future: future.value()[0] * scale).then(lambda future: future.value() / scale)

    return train(small, hook, 2.0)


def train_with_power_sgd() -> list[torch.Tensor]:
    return train(small, powerSGD_hook.powerSGD_hook,
                 lambda: powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.5))


def train_with_calls_in_callbacks(options: dict[str, Any]) -> list[torch.Tensor]:
    """Averages as without a hook, by two all-reduces; a callback makes the second. Ours on all backends."""
    def hook(size: int, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            return dist.all_reduce(future.value()[0].div_(size), async_op=True).get_future().wait()[0]

        return dist.all_reduce(bucket.buffer().div_(size), async_op=True).get_future().then(again)

    model = paceline.DistributedDataParallel(large(), **options)
    model.register_comm_hook(dist.get_world_size(), hook)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for seed in range(20):
        sgd.zero_grad()
        step(model, seed)
        sgd.step()
    return parameters_of(model)


def train_with_a_builtin_hook() -> list[torch.Tensor]:
    model = wrap(small())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    model(inputs_of(0)).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def train_with_zero_in_the_backward(wrapper: type, hook_with_zero: Any) -> list[torch.Tensor]:
    """ZeroRedundancyOptimizer steps within the communication hook."""
    model = wrapper(large(), bucket_cap_mb=1000)
    zero = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    model.register_comm_hook(None, hook_with_zero(default_hooks.allreduce_hook, model, zero))
    for seed in range(6):
        model.zero_grad()
        step(model, seed)
        zero.step()
    return parameters_of(model)


def train_with_post_local_sgd() -> list[torch.Tensor]:
    """Rank 0 also evaluates with other weights, as with averaged ones."""
    model = wrap(small())
    state = post_localSGD_hook.PostLocalSGDState(None, None, start_localSGD_iter=2, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    averager = PeriodicModelAverager(period=3, warmup_steps=2)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(7):
        sgd.zero_grad()
        step(model, seed)
        sgd.step()
        averager.average_parameters(model.parameters())
        if dist.get_rank() == 0:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.clone())
    return parameters_of(model)


class Hooks(ranks.Case):
    def test_hooks(self) -> None:
        self.equals_gloo(train_with_a_chain, sizes=(1, 2, 3), delta=1e-6)
        self.equals_gloo(train_with_power_sgd, sizes=(2,), delta=1e-4)
        self.equals_gloo(train_with_a_builtin_hook, sizes=(2,), delta=1e-3)

    def test_ranks_may_differ_with_local_sgd(self) -> None:
        self.equals_gloo(train_with_post_local_sgd, sizes=(2,), delta=1e-5)

    def test_hooks_with_calls_in_callbacks(self) -> None:
        expected = ranks.run(train_large, "gloo", 2, {"steps": 20})
        for backend in ("paceline", "gloo"):
            for options in ({}, {"bucket_cap_mb": 1000}):
                with self.subTest(backend=backend, options=options):
                    self.assert_same(ranks.run(train_with_calls_in_callbacks, backend, 2, options), expected, 1e-4)

    def test_a_sharded_optimizer_in_the_backward(self) -> None:
        # Not over Gloo, which it refuses.
        for hook in (ddp_zero_hook.hook_with_zero_step, ddp_zero_hook.hook_with_zero_step_interleaved):
            own, expected = (ranks.run(train_with_zero_in_the_backward, self.backend, 2, wrapper, hook)
                             for wrapper in (paceline.DistributedDataParallel, PyTorchs))
            self.assert_same(own, expected, 1e-5)


if __name__ == "__main__":
    unittest.main()
