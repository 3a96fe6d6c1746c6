"""Writes what Python's optimizers and averages make of known gradients: optimizers_expected.inc,
exponential_moving_average_expected.inc and files/optimizers.pt.

Needs a Python with torch:  python3 optimizers_expected.py
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

HERE = Path(__file__).parent
SHAPES = [(4, 6), (7, 3), (5, 5)]
STEPS = 6


def pattern(numbers: int, factor: int, offset: int, modulus: int, divisor: float) -> torch.Tensor:
    """Numbers that float32 has exactly; pattern of optimizers_test.cpp."""
    return ((torch.arange(numbers) * factor + offset) % modulus - modulus // 2).float() / divisor


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(pattern(a * b, 31, i, 37, 32).reshape(a, b).to(dtype)) for i, (a, b) in enumerate(SHAPES)]


def train(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    for step in steps:
        for i, param in enumerate(params):
            # The last one has no gradient at first.
            param.grad = None if i == 2 and step < 2 else pattern(param.numel(), 17, 5 * step + i, 29, 64).reshape(param.shape).to(param.dtype)
        optimizer.step()


def show(tensors: Iterable[torch.Tensor]) -> str:
    return "{" + ", ".join("{" + ", ".join(repr(value) for value in tensor.detach().double().flatten().tolist()) + "}"
                           for tensor in tensors) + "}"


Make = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
ADAMW = {"default": {}, "options": {"lr": 0.02, "betas": (0.8, 0.97), "eps": 1e-5, "weight_decay": 0.3}, "amsgrad": {"lr": 0.01, "amsgrad": True}}
MUON = {"default": {}, "options": {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8, "ns_coefficients": (3.0, -3.2, 1.2), "eps": 1e-3, "ns_steps": 3},
        "no nesterov": {"lr": 0.02, "nesterov": False}, "rms": {"lr": 0.02, "adjust_lr_fn": "match_rms_adamw"},
        "unclamped": {"lr": 0.02, "adjust_lr_fn": "spectral_unclamped"}}
CASES: list[tuple[str, torch.dtype, Make]] = []
for name, options in ADAMW.items():
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        case = f"AdamW {name} {str(dtype).removeprefix('torch.')}"
        CASES.append((f"{case} fused", dtype, lambda p, o=options: torch.optim.AdamW(p, fused=True, **o)))
        CASES.append((f"{case} loop", dtype, lambda p, o=options: torch.optim.AdamW(p, foreach=False, fused=False, **o)))
for name, options in MUON.items():
    CASES.append((f"Muon {name} float32", torch.float32, lambda p, o=options: torch.optim.Muon(p, **o)))


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))


def write_average(lines: list[str], states: dict[str, object]) -> None:
    for use_buffers in (False, True):
        model = net()
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.75), use_buffers=use_buffers)
        for step in range(5):
            for i, tensor in enumerate([*model.parameters(), *model.buffers()]):
                tensor.data.copy_(pattern(tensor.numel(), 13, 7 * step + i, 31, 8).reshape(tensor.shape))
            average.update_parameters(model)
        states[f"average {use_buffers}"] = average.state_dict()
        for key, tensor in average.module.state_dict().items():
            lines.append(f'{{{str(use_buffers).lower()}, "{key}", {show([tensor])[1:-1]}}},')


def main() -> None:
    made_by = f"// Made by optimizers_expected.py with PyTorch {torch.__version__}."
    lines = [made_by, "// the parameters after the training, and after its first half"]
    states: dict[str, object] = {}
    for case, dtype, make in CASES:
        params = parameters(dtype)
        optimizer = make(params)
        train(params, optimizer, range(STEPS // 2))
        half = show(params)
        states[case] = deepcopy(optimizer.state_dict())
        train(params, optimizer, range(STEPS // 2, STEPS))
        lines.append(f'{{"{case}", {show(params)}, {half}}},')
    (HERE / "optimizers_expected.inc").write_text("\n".join(lines) + "\n")
    lines = [made_by, "// use_buffers, name, values"]
    write_average(lines, states)
    (HERE / "exponential_moving_average_expected.inc").write_text("\n".join(lines) + "\n")
    torch.save(states, HERE / "files" / "optimizers.pt")


if __name__ == "__main__":
    main()
