#!/usr/bin/env python3
"""Files that C++ reads and writes, against torch.save, torch.load and the package safetensors."""

import subprocess
import tempfile
import unittest
import zipfile
from collections import OrderedDict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn

CONVERT = Path(__file__).resolve().parent.parent.parent / "build/release/bin/convert_checkpoint"

TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
         torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
         torch.float8_e5m2]


def typed_tensors() -> dict[str, torch.Tensor]:
    return {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in TYPES}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("offset", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x)) + self.offset


@unittest.skipUnless(CONVERT.exists(), f"needs {CONVERT}")
class Checkpoint(unittest.TestCase):
    def setUp(self) -> None:
        directory = tempfile.TemporaryDirectory(prefix="paceline-test-")
        self.addCleanup(directory.cleanup)
        self.directory = Path(directory.name)

    def convert(self, kind: str, source: str, target: str) -> None:
        subprocess.run([str(CONVERT), kind, self.directory / source, self.directory / target], check=True, timeout=60)

    def converted(self, value: object) -> object:
        torch.save(value, self.directory / "in.pt")
        self.convert("value", "in.pt", "out.pt")
        return torch.load(self.directory / "out.pt", weights_only=True)

    def assert_same(self, got: object, expected: object) -> None:
        if isinstance(expected, torch.Tensor):
            self.assertIsInstance(got, torch.Tensor)
            assert isinstance(got, torch.Tensor)
            self.assertEqual((got.dtype, got.shape, got.stride(), got.requires_grad),
                             (expected.dtype, expected.shape, expected.stride(), expected.requires_grad))
            self.assertTrue(torch.equal(got.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8)))
        elif isinstance(expected, dict):
            assert isinstance(got, dict)
            self.assertEqual(list(got), list(expected))
            for key, value in expected.items():
                self.assert_same(got[key], value)
        elif isinstance(expected, (list, tuple)):
            assert isinstance(got, (list, tuple))
            self.assertIs(type(got), type(expected))
            self.assertEqual(len(got), len(expected))
            for one, other in zip(got, expected):
                self.assert_same(one, other)
        else:
            self.assertIs(type(got), type(expected))
            self.assertEqual(got, expected)

    def test_values_are_the_same_again(self) -> None:
        value = {"none": None, "flags": [True, False], "integers": (0, -1, 255, 2**31, -(2**63), 2**63 - 1), "real": -2.5,
                 "infinite": float("inf"), "text": "Grüße \U0001f600", "complex": 1 - 2j, "device": torch.device("cuda", 1),
                 "nested": [{}, (), [[]], {1: {2.5: "x", False: None}}]}
        self.assert_same(self.converted(value), value)

    def test_tensors_are_the_same_again(self) -> None:
        value = typed_tensors() | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "transposed": torch.rand(3, 4).t(),
                                   "gradient": torch.rand(3, requires_grad=True)}
        self.assert_same(self.converted(value), value)

    def test_tensors_share_memory_again(self) -> None:
        base = torch.rand(3, 4)
        got = self.converted([base, base[1:, ::2]])
        assert isinstance(got, list)
        got[0].fill_(7)
        self.assertEqual(got[1].sum().item(), 7 * 4)

    def test_an_optimizer_and_a_schedule_go_on(self) -> None:
        def train(net: nn.Module, adam: torch.optim.Optimizer, schedule: torch.optim.lr_scheduler.LRScheduler) -> None:
            for _ in range(3):
                adam.zero_grad()
                net(torch.arange(12.0).reshape(4, 3)).square().sum().backward()
                adam.step()
                schedule.step()

        def made() -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
            torch.manual_seed(1)
            net = Net()
            adam = torch.optim.AdamW(net.parameters(), amsgrad=True)
            return net, adam, torch.optim.lr_scheduler.CosineAnnealingLR(adam, 10)

        first = made()
        train(*first)
        states = self.converted([part.state_dict() for part in first])
        assert isinstance(states, list)
        second = made()
        for part, state in zip(second, states):
            part.load_state_dict(state)
        train(*first)
        train(*second)
        self.assert_same(second[0].state_dict(), first[0].state_dict())

    def test_a_state_dict_is_one_again_in_each_format(self) -> None:
        torch.manual_seed(1)
        net = Net()
        net(torch.rand(4, 3))
        torch.save(net.state_dict(), self.directory / "a.pt")
        self.convert("tensors", "a.pt", "b.safetensors")
        self.assert_same(dict(sorted(load_file(self.directory / "b.safetensors").items())),
                         dict(sorted(net.state_dict().items())))
        self.convert("tensors", "b.safetensors", "c.pth")
        got = torch.load(self.directory / "c.pth", weights_only=True)
        self.assertIsInstance(got, OrderedDict)
        Net().load_state_dict(got)
        mapped = torch.load(self.directory / "c.pth", weights_only=True, mmap=True)
        self.assert_same(OrderedDict(mapped), got)
        with zipfile.ZipFile(self.directory / "c.pth") as archive:
            self.assertIsNone(archive.testzip())  # compares the checksums
        self.assert_same(dict(sorted(got.items())), dict(sorted(net.state_dict().items())))

    def test_a_whole_module_gives_its_state_dict(self) -> None:
        net = nn.parallel.DataParallel(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 1))))
        torch.save(net, self.directory / "module.pt")
        self.convert("tensors", "module.pt", "state.pt")
        got = torch.load(self.directory / "state.pt", weights_only=True)
        self.assert_same(got, OrderedDict(net.state_dict()))

    def test_safetensors_of_all_types(self) -> None:
        tensors = typed_tensors()
        del tensors["torch.complex128"]  # which the format does not have
        save_file(tensors, self.directory / "a.safetensors")
        self.convert("tensors", "a.safetensors", "b.safetensors")
        self.assert_same(dict(sorted(load_file(self.directory / "b.safetensors").items())), dict(sorted(tensors.items())))


if __name__ == "__main__":
    unittest.main()
