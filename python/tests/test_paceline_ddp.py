#!/usr/bin/env python3
"""paceline.DistributedDataParallel: what it computes, beside PyTorch's class on Gloo."""

import copy
import gc
import threading
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.checkpoint import checkpoint

import paceline
import ranks
from test_ddp import Branches, inputs_of, parameters_of

PyTorchs = nn.parallel.DistributedDataParallel


def wrap(module: nn.Module, **options: Any) -> PyTorchs:
    """PyTorch's class on Gloo, ours on paceline."""
    return (PyTorchs if dist.get_backend() == "gloo" else paceline.DistributedDataParallel)(module, **options)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 2))


def large() -> nn.Module:
    """Its weights have gradients of more than 64 KiB."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(9, 3000), nn.Tanh(), nn.Linear(3000, 200), nn.Tanh(), nn.Linear(200, 2))


def train(make: Any, hook: Any = None, state: Any = None, accumulate: int = 1, steps: int = 5, **options: Any) -> list[torch.Tensor]:
    model = wrap(make(), **options)
    if hook:
        model.register_comm_hook(state() if callable(state) else state, hook)
    sgd = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(steps):
        sgd.zero_grad()
        for micro in range(accumulate - 1):
            with model.no_sync():
                model(inputs_of(100 + step + micro)).pow(2).mean().backward()
        model(inputs_of(step)).pow(2).mean().backward()
        sgd.step()
    return parameters_of(model) + [buffer.clone() for buffer in model.buffers()]


def train_small(options: dict[str, Any]) -> list[torch.Tensor]:
    return train(small, **options)


def train_large(options: dict[str, Any]) -> list[torch.Tensor]:
    return train(large, **options)


def train_on_a_group_of_some(options: dict[str, Any]) -> list[torch.Tensor]:
    group = dist.new_group([0, 2])
    return train(large, process_group=group, **options) if dist.get_rank() != 1 else []


def train_branches(static: bool, late: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(Branches(), find_unused_parameters=not static, static_graph=static and not late)
    if late:
        model._set_static_graph()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(4):
        sgd.zero_grad(set_to_none=False)
        model(inputs_of(step), 0 if static else (step + dist.get_rank()) % 2).pow(2).mean().backward()
        sgd.step()
    return parameters_of(model)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(9, 9), nn.Linear(9, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.second(checkpoint(self.first, inputs, use_reentrant=True))


def train_nested() -> list[torch.Tensor]:
    model = wrap(Checkpointed(), static_graph=True)
    for step in range(3):
        model(inputs_of(step).requires_grad_()).pow(2).mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def train_sparsely() -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = wrap(nn.Sequential(nn.Embedding(20, 4, sparse=True), nn.Linear(4, 2)))
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor([1, 2 + dist.get_rank()])).sum().backward()
    gradient = model.module[0].weight.grad
    return [torch.tensor(gradient.is_sparse), gradient.to_dense(), model.module[1].weight.grad]


def train_with_delayed_parameters() -> list[torch.Tensor]:
    module = small()
    model = wrap(module, delay_all_reduce_named_params=[("3.weight", module[3].weight)], param_to_hook_all_reduce=module[0].weight)
    for step in range(2):
        model.zero_grad()
        model(inputs_of(step)).pow(2).mean().backward()
    return [parameter.grad for parameter in module.parameters()]


def train_without_some_parameters() -> list[torch.Tensor]:
    """The ignored parameter keeps its value and its gradient on each rank; buffers keep theirs."""
    module = small()
    PyTorchs._set_params_and_buffers_to_ignore_for_model(module, ["3.bias", "1.running_mean"])
    with torch.no_grad():
        module[3].bias.fill_(dist.get_rank())
    model = wrap(module)
    for step in range(2):
        model.zero_grad()
        model(inputs_of(step)).pow(2).mean().backward()
    return [parameter.grad for parameter in module.parameters()] + [module[3].bias.detach()] + list(module.buffers())


def train_unevenly(divide: bool) -> list[torch.Tensor]:
    module = small()
    model = wrap(module)
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        with model.join(divide_by_initial_world_size=divide):
            for step in range(2 + 2 * dist.get_rank()):
                sgd.zero_grad()
                model(inputs_of(step)).pow(2).mean().backward()
                sgd.step()
    assert dist.get_backend() == "gloo" or not model._join_config.enable  # the join has ended
    model(inputs_of(9)).sum().backward()
    return [*parameters_of(model), *module.buffers()]


def train_unevenly_with_a_sharded_optimizer() -> list[torch.Tensor]:
    module = small()
    model = wrap(module)
    adam = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    with Join([model, adam]):
        for step in range(2 + dist.get_rank()):
            adam.zero_grad()
            model(inputs_of(step)).pow(2).mean().backward()
            adam.step()
    return parameters_of(model)


def stop_early() -> str:
    model = wrap(small())
    try:
        with model.join(throw_on_early_termination=True):
            for step in range(2 + dist.get_rank()):
                model(inputs_of(step)).pow(2).mean().backward()
    except RuntimeError as error:
        return str(error)
    return ""


class Replacing(nn.Module):
    """Replaces its buffer in each forward, as some normalisations do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(9, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen = self.seen + inputs.mean()
        return self.linear(inputs) * (1 + self.seen)


def construct(options: dict[str, Any]) -> list[torch.Tensor]:
    """What construction makes of parameters and buffers that differ between the ranks."""
    module = small()
    with torch.no_grad():
        module[0].bias.fill_(dist.get_rank() + 1)
        module[1].running_mean.fill_(dist.get_rank() + 1)
    wrap(module, **options)
    return parameters_of(module) + list(module.buffers())


def look_at_buckets(options: dict[str, Any]) -> tuple[int, bool]:
    """The number of buckets, and whether gradients share memory."""
    model, hooked = (paceline.DistributedDataParallel(small(), **options) for _ in range(2))
    for seed in range(2):
        model.zero_grad()
        step(model, seed)
    buckets = set()

    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buckets.add(bucket.index())
        return default_hooks.allreduce_hook(None, bucket)

    hooked.register_comm_hook(None, hook)
    step(hooked)
    storages = {parameter.grad.untyped_storage().data_ptr() for parameter in model.parameters()}
    return len(buckets), len(storages) < len(parameters_of(model))


def replace_buffers(options: dict[str, Any]) -> list[torch.Tensor]:
    module = Replacing()
    with torch.no_grad():
        module.seen.fill_(dist.get_rank())
    model = wrap(module, **options)
    with torch.no_grad():
        module.seen.fill_(dist.get_rank() + 1)
    model(inputs_of(0)).sum().backward()
    after_one = module.seen.clone()
    model(inputs_of(1)).sum().backward()
    return [after_one, module.seen]


def train_two_forwards() -> list[torch.Tensor]:
    """Two forwards before one backward; the second one copies the buffers that the first one has saved."""
    model = wrap(small())
    for seed in range(2):
        model.zero_grad()
        (model(inputs_of(seed)).pow(2).mean() + model(inputs_of(seed + 10)).pow(2).mean()).backward()
    return [parameter.grad for parameter in model.parameters()] + list(model.buffers())


def change_the_type(there_and_back: bool) -> list[torch.Tensor]:
    """Steps with a part that is frozen, and then trained again, after the module had another type."""
    model = wrap(large(), find_unused_parameters=True)
    first = model.module[0].requires_grad_(False)
    if there_and_back:
        model.double().float()
    step(model)
    first.requires_grad_(True)
    step(model, 1)
    return [parameter.grad for parameter in model.parameters()]


def call_with_other_parameters() -> list[torch.Tensor]:
    """torch.func.functional_call through the wrapper; then a step with the module's own parameters."""
    model = wrap(small())
    others = {name: torch.zeros_like(parameter, requires_grad=True) for name, parameter in model.named_parameters()}
    for _ in range(2):
        torch.func.functional_call(model, others, inputs_of(0)).sum().backward()
    step(model)
    return [other.grad for other in others.values()] + [parameter.grad for parameter in model.parameters()]


def tree_sum(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum in the order of docs/determinism.md, which the C++ class has, too."""
    while len(values) > 1:
        values = [values[i] + values[i + 1] if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0]


def average_exactly() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of the gradient of a step and what it must be."""
    model = paceline.DistributedDataParallel(large())
    pairs = []
    for seed in range(3):
        alone = copy.deepcopy(model.module)
        alone.zero_grad()
        step(alone, seed)
        model.zero_grad()
        step(model, seed)
        for averaged, own in zip(model.parameters(), alone.parameters()):
            gathered = [torch.empty_like(own.grad) for _ in range(dist.get_world_size())]
            dist.all_gather(gathered, own.grad)
            pairs.append((averaged.grad.clone(), tree_sum(gathered) / dist.get_world_size()))
    return pairs


def step(model: nn.Module, seed: int = 0) -> None:
    model(inputs_of(seed)).pow(2).mean().backward()


def synchronise_late() -> list[torch.Tensor]:
    """As accelerate's trigger_sync_in_backward and Lightning do it."""
    model = wrap(nn.Linear(9, 2, bias=False), init_sync=True)
    with model.no_sync():
        output = model(inputs_of(0)).sum()
    assert not model.require_forward_param_sync
    model.require_backward_grad_sync = model.require_forward_param_sync = True
    model.reducer.prepare_for_backward([])
    output.backward()
    return [model.module.weight.grad]


def count_while_waiting() -> list[bool]:
    """Whether another Python thread runs on while this one waits for rank 0: in a forward that copies buffers, and in a backward."""
    model = paceline.DistributedDataParallel(small())
    counted, done = [0], threading.Event()

    def count() -> None:
        while not done.is_set():
            counted[0] += 1
            time.sleep(0)

    def goes_on(function: Any) -> bool:
        before = counted[0]
        if dist.get_rank() == 0:  # comes late
            while counted[0] < before + 2000:
                time.sleep(0)
        function()
        return counted[0] > before + 500

    thread = threading.Thread(target=count)
    thread.start()
    try:
        outputs = []
        result = [goes_on(lambda: outputs.append(model(inputs_of(0))))]
        return result + [goes_on(outputs[0].sum().backward)]
    finally:
        done.set()
        thread.join()


def memory() -> tuple[int, int, list[bool]]:
    """How much memory the backend handed out, the parameters' size, and whether models are freed."""
    group = dist.new_group()
    model = paceline.DistributedDataParallel(large(), process_group=group)
    for seed in range(3):
        model.zero_grad()
        step(model, seed)
    backend = group._get_backend(torch.device("cpu"))
    handed_out = backend.memory_stats()["allocated_bytes"]
    size = sum(parameter.nbytes for parameter in model.parameters())
    grads = [parameter.grad for parameter in model.parameters()]
    del model
    gc.collect()
    paceline.DistributedDataParallel(large(), process_group=group)
    return handed_out, size, [grad is not None for grad in grads]


def reduced_where_allocated() -> list[bool]:
    """For each large gradient, whether autograd allocated it where it is after the step, as a view of a bucket."""
    model = wrap(large(), gradient_as_bucket_view=True)
    born: dict[nn.Parameter, int] = {}
    parameters = [one for one in model.parameters() if one.nbytes >= 64 << 10]
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda one: born.update({one: one.grad.data_ptr()}))
    for seed in range(3):
        model.zero_grad()
        step(model, seed)
    return [born[one] == one.grad.data_ptr() for one in parameters]


class Training(ranks.Case):
    def test_plain(self) -> None:
        self.equals_gloo(train_small, {}, delta=1e-6)
        self.equals_gloo(train_large, {}, sizes=(2, 3), delta=1e-6)

    def test_gradients_are_exact(self) -> None:
        for size in (2, 3, 4):
            for pairs in ranks.run(average_exactly, self.backend, size):
                for averaged, expected in pairs:
                    self.assertTrue(torch.equal(averaged, expected))

    def test_options_of_buckets(self) -> None:
        for options in ({"gradient_as_bucket_view": True}, {"bucket_cap_mb": 0.001}, {"bucket_cap_mb_list": [0.001, 1]},
                        {"accumulate": 3}):
            self.equals_gloo(train_small, options, sizes=(2,), delta=1e-6)
        self.equals_gloo(train_large, {"accumulate": 3, "gradient_as_bucket_view": True}, sizes=(3,), delta=1e-4)

    def test_buckets(self) -> None:
        self.assertEqual(ranks.run(look_at_buckets, self.backend, 2, {"gradient_as_bucket_view": True})[0], (1, True))
        buckets, shared = ranks.run(look_at_buckets, self.backend, 2, {"bucket_cap_mb": 0.0001})[0]
        self.assertGreater(buckets, 3)
        self.assertFalse(shared)

    def test_construction(self) -> None:
        for options in ({}, {"init_sync": False}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}):
            self.equals_gloo(construct, options, sizes=(2,))

    def test_a_group_of_some_ranks(self) -> None:
        self.equals_gloo(train_on_a_group_of_some, {}, sizes=(3,), delta=1e-6)

    def test_unused_parameters(self) -> None:
        self.equals_gloo(train_branches, False, False, sizes=(1, 2, 3), delta=1e-6)

    def test_static_graph(self) -> None:
        self.equals_gloo(train_branches, True, False, sizes=(2,), delta=1e-6)
        self.equals_gloo(train_branches, True, True, sizes=(2,), delta=1e-6)
        self.equals_gloo(train_nested, sizes=(2,), delta=1e-6)

    def test_sparse_gradients(self) -> None:
        self.equals_gloo(train_sparsely, sizes=(2,), delta=1e-6)

    def test_delayed_parameters(self) -> None:
        # PyTorch's class leaves the delayed gradient of the first step to the next; ours does not.
        own = ranks.run(train_with_delayed_parameters, self.backend, 2)
        self.assert_same(own[0], own[1])

    def test_ignored_parameters(self) -> None:
        self.equals_gloo(train_without_some_parameters, sizes=(2,), delta=1e-6)

    def test_uneven_inputs(self) -> None:
        self.equals_gloo(train_unevenly, True, sizes=(2, 3), delta=1e-6)
        self.equals_gloo(train_unevenly, False, sizes=(3,), delta=1e-6)
        self.equals_gloo(train_unevenly_with_a_sharded_optimizer, sizes=(2,), delta=1e-5)

    def test_uneven_inputs_that_are_an_error(self) -> None:
        self.equals_gloo(stop_early, sizes=(2,))

    def test_buffers(self) -> None:
        for options in ({}, {"broadcast_buffers": False}, {"forward_sync_buffers": False}):
            self.equals_gloo(replace_buffers, options, sizes=(2,), delta=1e-6)

    def test_a_type_that_changes_back(self) -> None:
        self.assert_same(ranks.run(change_the_type, self.backend, 2, True), ranks.run(change_the_type, "gloo", 2, False), 1e-6)

    def test_functional_call(self) -> None:
        self.equals_gloo(call_with_other_parameters, sizes=(2,), delta=1e-6)

    def test_two_forwards_before_a_backward(self) -> None:
        self.equals_gloo(train_two_forwards, sizes=(2,), delta=1e-6)

    def test_synchronisation_after_the_forward(self) -> None:
        self.equals_gloo(synchronise_late, sizes=(2,), delta=1e-6)

    def test_other_threads_go_on(self) -> None:
        self.assertEqual(ranks.run(count_while_waiting, self.backend, 2)[1], [True, True])

    def test_gradients_are_in_shared_memory(self) -> None:
        for handed_out, size, kept in ranks.run(memory, self.backend, 2):
            self.assertGreaterEqual(handed_out, size)
            self.assertTrue(all(kept))

    def test_gradients_are_reduced_where_autograd_allocates_them(self) -> None:
        self.assertEqual(ranks.run(reduced_where_allocated, self.backend, 2), [[True, True]] * 2)


if __name__ == "__main__":
    unittest.main()
