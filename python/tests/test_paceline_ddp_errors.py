#!/usr/bin/env python3
"""paceline.DistributedDataParallel: what it refuses, and what ranks raise if one of them fails."""

import copy
import os
import signal
import time
import unittest
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import paceline
import ranks
from test_ddp import Branches, inputs_of
from test_paceline_ddp import large, small, step


def error_of(function: Any) -> tuple[str, str, Any]:
    """The type and text of the error that the call must raise, and its ranks."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "ranks", None)
    raise AssertionError("no error")


def lose_a_rank() -> tuple[float, Any, Any]:
    """Rank 1 is killed in its backward."""
    model = paceline.DistributedDataParallel(large())
    step(model)
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        def die(_: torch.Tensor) -> None:
            store.set("killed", str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)

        model.module[2].weight.register_hook(die)
    error = error_of(lambda: step(model, 1))
    delay = time.monotonic() - float(store.get("killed"))
    return delay, error, error_of(lambda: step(model, 2))


def leave_a_parameter_out() -> Any:
    model = paceline.DistributedDataParallel(Branches())
    return error_of(lambda: model(inputs_of(0), 0).sum().backward())


def wrap_different_models(members: list[int]) -> Any:
    group = dist.new_group(members)
    if dist.get_rank() not in members:
        return None
    return error_of(lambda: paceline.DistributedDataParallel(nn.Linear(3 + dist.get_rank(), 2), process_group=group))


def fail_in_a_hook() -> Any:
    def hook(_: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if dist.get_rank() == 1:
            raise KeyError("no such table")
        return default_hooks.allreduce_hook(None, bucket)

    model = paceline.DistributedDataParallel(small())
    model.register_comm_hook(None, hook)
    return error_of(lambda: step(model))


def take_a_parameter_away() -> list[Any]:
    """A backward through a model whose reduction another one has ended."""
    trunk = nn.Linear(9, 6)
    a, b = (paceline.DistributedDataParallel(nn.Sequential(trunk, nn.Linear(6, size))) for size in (2, 3))
    a.eval()
    early = a(inputs_of(0)).sum() + b(inputs_of(0)).sum()
    errors = [error_of(early.backward)]
    a.train()
    step(a)
    late = a(inputs_of(0)).sum()
    c = paceline.DistributedDataParallel(trunk)
    errors.append(error_of((late + c(inputs_of(0)).sum()).backward))
    step(a)
    step(b)
    return errors


def run_forwards_inside_of_steps() -> list[Any]:
    """In the backward of another model with a common parameter, as if checkpointed; in the forward of one with another group."""
    trunk = nn.Linear(9, 6)
    a, b = (paceline.DistributedDataParallel(nn.Sequential(trunk, nn.Linear(6, size))) for size in (2, 3))

    @torch.enable_grad()
    def run_the_other(_: torch.Tensor) -> None:
        b(inputs_of(0))

    hook = trunk.weight.register_post_accumulate_grad_hook(run_the_other)
    errors = [error_of(lambda: step(a))]
    hook.remove()
    step(a)
    step(b)
    inner = paceline.DistributedDataParallel(nn.Linear(9, 6), process_group=dist.new_group())
    outer = paceline.DistributedDataParallel(nn.Sequential(inner))
    errors.append(error_of(lambda: outer(inputs_of(0))))
    step(inner)
    return errors


def do_different_steps() -> Any:
    model = paceline.DistributedDataParallel(large())
    if dist.get_rank() == 1:
        model(inputs_of(0))
    return error_of(lambda: step(model))


def misuse() -> list[str]:
    """What each invalid call raises; None where it raises nothing."""
    module = small()
    wrapper = paceline.DistributedDataParallel
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    lazy = nn.LazyLinear(2)
    meta = nn.Linear(2, 2, device="meta")
    sparse = nn.Linear(2, 2)
    sparse.register_buffer("mask", torch.eye(2).to_sparse())
    calls = [
        lambda: wrapper(module, device_ids=[0]),
        lambda: wrapper(module, output_device=0),
        lambda: wrapper(module, mixed_precision=object()),
        lambda: wrapper(module, check_reduction=True),
        lambda: wrapper(module, batched_grad_copy=True),
        lambda: wrapper(module, lazy_bucket_allocation=True),
        lambda: wrapper(module, broadcast_buffers=True, forward_sync_buffers=True),
        lambda: wrapper(module, bucket_cap_mb=1, bucket_cap_mb_list=[1]),
        lambda: wrapper(module, bucket_cap_mb=0),
        lambda: wrapper(module, process_group=dist.group.WORLD, device_mesh=mesh["b"]),
        lambda: wrapper(module, device_mesh=mesh["b"]),
        lambda: wrapper(module, param_to_hook_all_reduce=module[0].weight),
        lambda: wrapper(module, delay_all_reduce_named_params=[("x", module[0].weight)], param_to_hook_all_reduce=module[0].weight),
        lambda: wrapper(module, skip_all_reduce_unused_params=True),
        lambda: wrapper(nn.Tanh()),
        lambda: wrapper(lazy),
        lambda: wrapper(meta),
        lambda: wrapper(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        lambda: wrapper(nn.Linear(2, 2).requires_grad_(False)),
        lambda: wrapper(sparse),
    ]
    texts = [": ".join(error_of(call)[:2]) for call in calls]

    model = wrapper(module)
    other = wrapper(nn.Linear(9, 2))
    step(other)
    replaced = wrapper(nn.Linear(9, 2))
    replaced.module.more = nn.Parameter(torch.zeros(2, 9))
    assigned = wrapper(nn.Linear(9, 2))
    assigned.module.load_state_dict(nn.Linear(9, 2).state_dict(), assign=True)
    calls = [
        lambda: model.register_comm_hook(None, 3),
        lambda: other.register_comm_hook(None, default_hooks.allreduce_hook),
        lambda: model._register_buffer_comm_hook(None, print),
        lambda: model._register_fused_optim(torch.optim.Adam),
        lambda: model._check_reducer_finalized(),
        lambda: setattr(model, "require_manual_backward_finalization", True),
        lambda: other._set_static_graph(),
        lambda: step(replaced),
        lambda: step(assigned),
    ]
    texts += [": ".join(error_of(call)[:2]) for call in calls]
    model.require_manual_backward_finalization = False  # as it is
    model._sync_buffers()
    step(model)  # still usable
    return texts


def evaluate_a_copy_alone() -> list[str]:
    """What rank 0's error about the first forward of a copy says besides; rank 1 is in the model's own step."""
    model = paceline.DistributedDataParallel(small())
    again = copy.deepcopy(model).eval()
    try:
        again(inputs_of(0)) if dist.get_rank() == 0 else step(model)
    except dist.DistBackendError as error:
        return getattr(error, "__notes__", [])
    return []


REFUSALS = [
    r"ValueError: paceline.DistributedDataParallel does not take device_ids=\[0\]: modules are on the CPU",
    "ValueError: .* does not take output_device=0",
    "ValueError: .* does not take mixed_precision=.*: use torch.autocast",
    "ValueError: .* does not take check_reduction=True",
    "ValueError: .* does not take batched_grad_copy=True",
    "ValueError: .* does not take lazy_bucket_allocation=True",
    "ValueError: set broadcast_buffers or forward_sync_buffers, not both",
    "ValueError: set bucket_cap_mb or bucket_cap_mb_list, not both",
    "ValueError: a bucket of 0 MiB: .* must be positive",
    "ValueError: set process_group or device_mesh, not both",
    "ValueError: .* needs a device_mesh of one dimension that is not part of a larger one",
    "ValueError: delay_all_reduce_named_params and param_to_hook_all_reduce need each other",
    "UsageError: delay_all_reduce_named_params names x, which is not a parameter",
    "UsageError: skip_all_reduce_unused_params requires find_unused_parameters",
    "UsageError: DistributedDataParallel needs a parameter that requires a gradient",
    "ValueError: parameter weight is not initialized yet",
    "ValueError: parameter weight is on meta: .* is for modules on the CPU",
    "ValueError: the module has a SyncBatchNorm",
    "UsageError: DistributedDataParallel needs a parameter that requires a gradient",
    "ValueError: buffer mask is torch.sparse_coo: .* copies dense buffers",
    "TypeError: the communication hook must be callable",
    "UsageError: register_comm_hook: call it before the first backward",
    "NotImplementedError: .* has no hooks for buffers",
    "NotImplementedError: .* has no fused optimizers",
    "AttributeError: .* has a reducer of its own, which lacks _check_reducer_finalized",
    "ValueError: .* does not take require_manual_backward_finalization=True: a backward ends with its reduction",
    "ValueError: _set_static_graph: call it before the first step",
    "ValueError: the module has 3 parameters and had 2 when it was wrapped",
    "ValueError: parameter weight is another tensor than when the module was wrapped",
]


class Errors(ranks.Case):
    def test_what_is_refused(self) -> None:
        for texts in ranks.run(misuse, self.backend, 2):
            for text, expected in zip(texts, REFUSALS, strict=True):
                self.assertRegex(text, expected)

    def test_a_rank_killed_in_its_backward(self) -> None:
        for result in ranks.run(lose_a_rank, self.backend, 3, dying=[1])[::2]:
            delay, (kind, text, culprits), (later, *_) = result
            self.assertLess(delay, 30)  # no timeout
            self.assertEqual((kind, culprits, later), ("PeerLost", [1], "PeerLost"))
            self.assertRegex(text, r"rank 1( on node 0)? was lost")

    def test_a_parameter_without_a_gradient(self) -> None:
        for kind, text, _ in ranks.run(leave_a_parameter_out, self.backend, 2):
            self.assertEqual(kind, "Mismatch")
            self.assertIn("2 of 8 parameters got no gradient in this backward: heads.1", text)

    def test_different_models(self) -> None:
        for backend in ("paceline", "gloo"):
            for kind, text, culprits in ranks.run(wrap_different_models, backend, 3, [0, 2])[::2]:
                self.assertEqual((kind, culprits), ("Mismatch", [2]))
                self.assertIn("the first difference is weight, a parameter of shape [2, 3] and type Float on rank 0 and weight, "
                              "a parameter of shape [2, 5] and type Float on rank 2", text)

    def test_a_hook_that_raises(self) -> None:
        for backend in ("paceline", "gloo"):
            for rank, (kind, text, _) in enumerate(ranks.run(fail_in_a_hook, backend, 2)):
                self.assertIn(kind, ("Mismatch",) if backend == "paceline" else ("DistBackendError", "Mismatch"))
                if backend == "paceline" or rank == 1:
                    self.assertIn("no such table", text)

    def test_a_copy_on_one_rank(self) -> None:
        notes = ranks.run(evaluate_a_copy_alone, self.backend, 2)
        self.assertRegex("".join(notes[0]), "copied, .* first forward with grad mode on, which is collective: .* torch.no_grad")
        self.assertEqual(notes[1], [])

    def test_a_parameter_that_another_model_has_taken(self) -> None:
        for errors in ranks.run(take_a_parameter_away, self.backend, 2):
            for kind, text, _ in errors:
                self.assertEqual(kind, "RuntimeError")
                self.assertRegex(text, r"parameter 1\.(weight|bias) got a gradient that no model averages")

    def test_a_forward_inside_of_another_models_step(self) -> None:
        for (kind, text, _), (inner_kind, inner_text, _) in ranks.run(run_forwards_inside_of_steps, self.backend, 2):
            self.assertEqual((kind, inner_kind), ("UsageError", "RuntimeError"))
            self.assertIn("checkpoint inside of the wrapped module", text)
            self.assertIn("over another process group: make the inner one before", inner_text)

    def test_different_steps(self) -> None:
        for backend in ("paceline", "gloo"):
            for kind, text, culprits in ranks.run(do_different_steps, backend, 3):
                self.assertEqual((kind, culprits), ("Mismatch", [1]))
                self.assertIn("forwards", text)


if __name__ == "__main__":
    unittest.main()
