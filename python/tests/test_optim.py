#!/usr/bin/env python3
"""States of C++'s schedules and optimizers, which Python's load and go on from."""

import subprocess
import sys
import tempfile
import unittest
import warnings
from collections import Counter
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent.parent
SAVE = ROOT / "build/release/bin/save_optim_states"
sys.path.insert(0, str(ROOT / "tests/optim"))

import optimizers_expected as optimizers  # noqa: E402
import schedules  # noqa: E402


def with_bounds(optimizer: torch.optim.Optimizer, state: dict[str, object]) -> dict[str, object]:
    """The state with what Python's OneCycleLR keeps in an optimizer's groups, which C++ leaves out."""
    groups = state["param_groups"]
    assert isinstance(groups, list)
    return state | {"param_groups": [own | loaded for own, loaded in zip(optimizer.state_dict()["param_groups"], groups)]}


@unittest.skipUnless(SAVE.exists(), f"needs {SAVE}")
class Optim(unittest.TestCase):
    def setUp(self) -> None:
        warnings.simplefilter("ignore")  # no step of the optimizer before the schedule's
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as directory:
            subprocess.run([str(SAVE), f"{directory}/states.pt"], check=True, timeout=60)
            self.states = torch.load(f"{directory}/states.pt", weights_only=True)

    def test_schedules_go_on(self) -> None:
        for name, make in schedules.SCHEDULES.items():
            for kind in schedules.optimizer_kinds(name):
                with self.subTest(schedule=name, optimizer=kind):
                    self.compare_schedules(name, kind, make)

    def compare_schedules(self, name: str, kind: str, make: schedules.Make) -> None:
        state = self.states[f"{name} {kind}"]
        if name == "sequence_of_all":  # Python needs its Counter in a SequentialLR
            part = state["schedule"]["_schedulers"][2]
            part["milestones"] = Counter(part["milestones"])
        expected = schedules.make_optimizer(kind)
        schedule = make(expected)
        for _ in range(schedules.SAVED_AFTER):
            schedule.step()
        loaded = schedules.make_optimizer(kind)
        other = make(loaded)
        other.load_state_dict(state["schedule"])
        loaded.load_state_dict(with_bounds(loaded, state["optimizer"]) if "one_cycle" in name else state["optimizer"])
        self.assertEqual(other.last_epoch, schedule.last_epoch)
        for _ in range(schedules.SAVED_AFTER, schedules.EPOCHS):
            for own, group in zip(loaded.param_groups, expected.param_groups):
                self.assertAlmostEqual(own["lr"], group["lr"], delta=1e-12 * abs(group["lr"]))
            for own, momentum in zip(schedules.momenta(loaded), schedules.momenta(expected)):
                self.assertAlmostEqual(own, momentum, delta=1e-12)
            schedule.step()
            other.step()

    def test_optimizers_go_on(self) -> None:
        half = optimizers.STEPS // 2
        for case, dtype, make in optimizers.CASES:
            with self.subTest(case):
                expected = optimizers.parameters(dtype)
                optimizer = make(expected)
                optimizers.train(expected, optimizer, range(half))
                loaded = [torch.nn.Parameter(parameter.detach().clone()) for parameter in expected]
                other = make(loaded)
                other.load_state_dict(self.states[case])
                optimizers.train(expected, optimizer, range(half, optimizers.STEPS))
                optimizers.train(loaded, other, range(half, optimizers.STEPS))
                for own, parameter in zip(loaded, expected):
                    tolerance = 2e-2 if dtype == torch.bfloat16 else 3e-3 if "Muon" in case else 1e-6
                    torch.testing.assert_close(own, parameter, rtol=0, atol=tolerance)


if __name__ == "__main__":
    unittest.main()
