"""The schedules of which C++ and Python must have the same learning rates; schedules.h has them too."""

from collections.abc import Callable

import torch
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    PolynomialLR,
    SequentialLR,
    StepLR,
)

EPOCHS = 40
SAVED_AFTER = 7

Make = Callable[[torch.optim.Optimizer], LRScheduler]
SCHEDULES: dict[str, Make] = {
    "step": lambda o: StepLR(o, 3, 0.7),
    "multi_step": lambda o: MultiStepLR(o, [9, 2, 2, 30], 0.3),
    "constant": lambda o: ConstantLR(o, 0.3, 8),
    "constant_for_no_epoch": lambda o: ConstantLR(o, 0.3, 0),
    "linear": lambda o: LinearLR(o, 0.01, 0.9, 11),
    "linear_to_zero": lambda o: LinearLR(o, 1.0, 0.0, 9),
    "polynomial": lambda o: PolynomialLR(o, 17, 1.7),
    "cosine": lambda o: CosineAnnealingLR(o, 13, 0.003),
    "cosine_of_one": lambda o: CosineAnnealingLR(o, 1),
    "one_cycle": lambda o: OneCycleLR(o, [0.4, 0.9], total_steps=40),
    "one_cycle_linear": lambda o: OneCycleLR(o, 0.4, epochs=8, steps_per_epoch=5, pct_start=0.25, anneal_strategy="linear",
                                             base_momentum=[0.7, 0.75], max_momentum=0.9, div_factor=10, final_div_factor=100),
    "one_cycle_three_phases": lambda o: OneCycleLR(o, 0.4, total_steps=50, pct_start=0.2, three_phase=True),
    "one_cycle_without_momentum": lambda o: OneCycleLR(o, 0.4, total_steps=45, cycle_momentum=False),
    "lambda": lambda o: LambdaLR(o, [lambda epoch: 0.95**epoch, lambda epoch: 1 / (1 + epoch)]),
    "warm_up_and_cosine": lambda o: SequentialLR(
        o, [LinearLR(o, 0.1, total_iters=5), CosineAnnealingLR(o, 30, 0.001)], [5]),
    "sequence_of_all": lambda o: SequentialLR(
        o, [ConstantLR(o, 0.5, 3), StepLR(o, 2, 0.9), MultiStepLR(o, [0, 2], 0.8), PolynomialLR(o, 6, 2.0),
            LambdaLR(o, lambda epoch: 0.9**epoch), LinearLR(o)], [4, 9, 14, 20, 26]),
    "sequence_that_skips": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 4)], [0]),
    "sequence_with_one_cycle": lambda o: SequentialLR(o, [ConstantLR(o, 0.5, 20), OneCycleLR(o, 0.4, total_steps=30)], [10]),
}


def make_optimizer(kind: str) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1}, {"params": [torch.nn.Parameter(torch.zeros(3))], "lr": 0.35}]
    if kind == "adam":
        return torch.optim.Adam(groups)
    if kind == "adamw":
        return torch.optim.AdamW(groups)
    return torch.optim.SGD(groups, momentum=0.9)


def optimizer_kinds(name: str) -> list[str]:
    return ["sgd", "adam", "adamw"] if name == "one_cycle" else ["sgd"]


def momenta(optimizer: torch.optim.Optimizer) -> list[float]:
    return [group["betas"][0] if "betas" in group else group["momentum"] for group in optimizer.param_groups]
