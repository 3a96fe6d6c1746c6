#!/usr/bin/env python3
"""Copies of paceline.DistributedDataParallel, by deepcopy and by pickle."""

import copy
import pickle
import unittest
from typing import Any

import torch
import torch.distributed as dist

import paceline
import ranks
from test_ddp import inputs_of
from test_paceline_ddp import large, small, step


def erase(state: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(torch.full_like(bucket.buffer(), state))
    return future


def copy_with_a_hook() -> bool:
    model = paceline.DistributedDataParallel(small())
    model.register_comm_hook(3.0, erase)
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in again:
        step(one)
    return all(torch.equal(parameter.grad, torch.full_like(parameter, 3)) for one in again for parameter in one.parameters())


def copy_with_a_builtin_hook() -> list[bool]:
    """Whether copies train like the model."""
    model = paceline.DistributedDataParallel(small())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    for one in (model, *again):
        step(one)
    return [torch.equal(one.grad, own.grad) for other in again for one, own in zip(other.parameters(), model.parameters())]


def copies() -> dict[str, Any]:
    """A copy and an unpickled model train like the model, and their parameters are their own."""
    model = paceline.DistributedDataParallel(large(), bucket_cap_mb=3, static_graph=True)
    model(inputs_of(0)).pow(2).mean().backward()
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    result = {}
    for one in again:
        one.zero_grad()
        one(inputs_of(1)).pow(2).mean().backward()
    model.zero_grad()
    model(inputs_of(1)).pow(2).mean().backward()
    for one in again:
        for own, of_copy in zip(model.parameters(), one.parameters()):
            assert own.data_ptr() != of_copy.data_ptr()
            torch.testing.assert_close(own.grad, of_copy.grad, rtol=0, atol=0)
        assert one.static_graph and one.bucket_bytes_cap == 3 << 20
    if dist.get_rank() == 0:  # a copy that is not trained needs no other rank
        with torch.no_grad():
            copy.deepcopy(model)(inputs_of(0))
    state = model.state_dict()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    result["keys"], result["sum"] = list(state), sum(parameter.abs().sum().item() for parameter in model.parameters())
    return result


def copy_with_a_group() -> str:
    model = paceline.DistributedDataParallel(small(), process_group=dist.new_group())
    try:
        copy.deepcopy(model)
    except RuntimeError as error:
        return str(error)
    return ""


class Copies(ranks.Case):
    def test_copies_train_like_the_model(self) -> None:
        for result in ranks.run(copies, self.backend, 2):
            self.assertEqual(result["keys"][:2], ["module.0.weight", "module.0.bias"])
            self.assertEqual(result["sum"], 0)

    def test_copies_keep_the_hook(self) -> None:
        self.assertEqual(ranks.run(copy_with_a_hook, self.backend, 2), [True] * 2)

    def test_copies_keep_a_builtin_hook(self) -> None:
        for equal in ranks.run(copy_with_a_builtin_hook, self.backend, 2):
            self.assertTrue(all(equal))

    def test_copies_need_the_default_group(self) -> None:
        self.assertIn("default process group", ranks.run(copy_with_a_group, self.backend, 2)[0])


if __name__ == "__main__":
    unittest.main()
