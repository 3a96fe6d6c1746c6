"""Writes what Python's powerSGD_hook makes of known gradients on two ranks: power_sgd_expected.inc.

Needs a Python with torch and numpy:  python3 power_sgd_expected.py
"""

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_wrapper, fp16_compress_wrapper
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

HERE = Path(__file__).parent
SHAPES = [(6, 5), (20, 24), (7,), (6, 5), (5, 2, 9)]
STEPS = 6
Wrapper = Callable[[Callable], Callable]
CASES: list[tuple[str, torch.dtype, dict[str, object], Wrapper | None]] = [
    *((f"rank{r}", torch.float64, {"matrix_approximation_rank": r}, None) for r in (1, 2, 3, 4)),
    ("float32", torch.float32, {"matrix_approximation_rank": 2}, None),
    ("without_error_feedback", torch.float64, {"use_error_feedback": False}, None),
    ("without_warm_start", torch.float64, {"warm_start": False}, None),
    ("other_numbers", torch.float64, {"random_seed": 12345, "orthogonalization_epsilon": 0.25, "min_compression_rate": 1.2}, None),
    ("as_float16", torch.float32, {}, fp16_compress_wrapper),
    ("as_bfloat16", torch.float32, {}, bf16_compress_wrapper),
]


def pattern(numbers: int, factor: int, offset: int, modulus: int, divisor: float) -> torch.Tensor:
    """Numbers that float16 has exactly; pattern of power_sgd_test.cpp."""
    return ((torch.arange(numbers) * factor + offset) % modulus - modulus // 2).double() / divisor


class Bucket:
    """Stands in for dist.GradBucket: one bucket of all gradients."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def set_buffer(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def gradients(self) -> list[torch.Tensor]:
        parts = self._buffer.split([torch.Size(shape).numel() for shape in SHAPES])
        return [part.view(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def run(rank: int, store: str) -> None:
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    lines = []
    for name, dtype, options, wrapper in CASES:
        state = PowerSGDState(process_group=None, **{"start_powerSGD_iter": 2, **options})
        hook = wrapper(powerSGD_hook) if wrapper else powerSGD_hook
        rows = []
        for step in range(STEPS):
            gradients = [pattern(torch.Size(shape).numel(), 17, 7 * step + 11 * rank + i, 29, 64) for i, shape in enumerate(SHAPES)]
            buffer = torch.cat(gradients).to(dtype)
            buffer.copy_(hook(state, Bucket(buffer)).wait())
            averages = Bucket(buffer).gradients()
            # Two numbers for each gradient, which any other gradient is unlikely to have.
            rows.append([number for i, average in enumerate(averages) for number in (
                average.double().norm().item(), (average.flatten().double() * pattern(average.numel(), 13, i, 31, 16)).sum().item())])
        rate = state.compression_stats()[0]
        lines.append(f'{{"{name}", {rate!r}, {{{", ".join("{" + ", ".join(map(repr, row)) + "}" for row in rows)}}}}},\n')
    if rank == 0:
        (HERE / "power_sgd_expected.inc").write_text("".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(run, (f"{directory}/store",), nprocs=2)
