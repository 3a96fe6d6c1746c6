#!/usr/bin/env python3
"""What stands in for PyTorch's: paceline.replace_ddp, and the backend under the name gloo."""

import inspect
import os
import pickle
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import paceline
import ranks
from test_paceline_ddp import PyTorchs, small, step


def replace_twice() -> list[Any]:
    class Derived(PyTorchs):

        def __init__(self, width: int) -> None:
            super().__init__(nn.Linear(width, 1))

    signature = inspect.signature(PyTorchs)
    before = PyTorchs(small())
    paceline.replace_ddp()
    paceline.replace_ddp()
    from torch.nn.parallel.distributed import DistributedDataParallel as imported

    ours = [PyTorchs(small()), imported(module=small(), static_graph=True)]
    result: list[Any] = [type(model) is paceline.DistributedDataParallel for model in ours]
    result += [isinstance(model, PyTorchs) for model in ours]
    result += [type(before) is PyTorchs, type(Derived(2)) is Derived, type(PyTorchs.__new__(PyTorchs, nn.Linear(
        2, 2, device="meta"))) is PyTorchs]
    step(ours[0])
    unpickled = pickle.loads(pickle.dumps(before))
    result += [type(unpickled) is PyTorchs, inspect.signature(PyTorchs) == signature]
    for model in (before, unpickled):
        model.zero_grad()
        step(model)
    result.append(all(torch.allclose(one.grad, other.grad) for one, other in zip(before.parameters(), unpickled.parameters())))
    return result


def construct_what_ours_refuses() -> list[Any]:
    """The classes of models with tensor parallelism, and of one with an argument that only PyTorch's class has."""
    paceline.replace_ddp()
    mesh = dist.init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicas", "shards"))
    sharded = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    parallelize_module(sharded, mesh["shards"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    models = [PyTorchs(sharded, device_mesh=mesh["replicas"]), PyTorchs(small(), device_mesh=mesh["shards"]),
              PyTorchs(small(), batched_grad_copy=True)]
    step(models[1])
    return [type(model).__module__ for model in models]


AS_GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
assert dist.get_backend() == "gloo"
one = torch.ones(3)
dist.all_reduce(one)
print(type(dist.group.WORLD._get_backend(torch.device("cpu"))).__name__, one[0].item(), flush=True)
dist.destroy_process_group()
"""


class Replacements(ranks.Case):
    def test_replace_ddp(self) -> None:
        for backend in ("paceline", "gloo"):
            for result in ranks.run(replace_twice, backend, 2):
                self.assertEqual(result, [True] * 10)

    def test_replace_ddp_leaves_what_ours_refuses(self) -> None:
        for backend in ("paceline", "gloo"):
            for classes in ranks.run(construct_what_ours_refuses, backend, 2):
                self.assertEqual(classes, ["torch.nn.parallel.distributed"] * 3)

    def test_as_gloo(self) -> None:
        for as_gloo, begin, expected in (("1", "", "Backend 2.0"), ("1", "import paceline\n", "Backend 2.0"),
                                         ("0", "", "ProcessGroupGloo 2.0"), ("0", "import paceline\n", "ProcessGroupGloo 2.0")):
            with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
                script = Path(directory, "program.py")
                script.write_text(begin + AS_GLOO.replace(
                    'init_process_group("gloo")', f'init_process_group("gloo", init_method="file://{directory}/store", '
                    'rank=int(__import__("os").environ["RANK"]), world_size=2)'))
                processes = [subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True,
                                              env=os.environ | {"RANK": str(rank), "PACELINE_AS_GLOO": as_gloo}) for rank in range(2)]
                try:
                    said = [process.communicate(timeout=ranks.PATIENCE)[0] for process in processes]
                finally:
                    for process in processes:
                        process.kill()
                        process.wait()
                self.assertEqual(said, [expected + "\n"] * 2)


if __name__ == "__main__":
    unittest.main()
