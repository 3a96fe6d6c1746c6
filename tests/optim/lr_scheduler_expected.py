"""Writes the learning rates and states of Python's schedules: lr_scheduler_expected.inc and files/schedules.pt.

Needs a Python with torch:  python3 lr_scheduler_expected.py
"""

import warnings
from copy import deepcopy
from pathlib import Path

import torch
from schedules import EPOCHS, SAVED_AFTER, SCHEDULES, make_optimizer, momenta, optimizer_kinds

HERE = Path(__file__).parent


def show(values: list[float]) -> str:
    return "{" + ", ".join(repr(float(value)) for value in values) + "}"


warnings.simplefilter("ignore")  # no step of the optimizer before the schedule's
lines = [f"// Made by lr_scheduler_expected.py with PyTorch {torch.__version__}.",
         "// schedule, optimizer, learning rates of two groups at each epoch, their momenta"]
states = {}
for name, make in SCHEDULES.items():
    for kind in optimizer_kinds(name):
        optimizer = make_optimizer(kind)
        schedule = make(optimizer)
        rates, momentum = [], []
        for epoch in range(EPOCHS):
            rates.append(show([group["lr"] for group in optimizer.param_groups]))
            momentum.append(show(momenta(optimizer)))
            if epoch == SAVED_AFTER:
                states[f"{name} {kind}"] = deepcopy({"schedule": schedule.state_dict(), "optimizer": optimizer.state_dict()})
            schedule.step()
        lines.append(f'{{"{name}", "{kind}", {{{", ".join(rates)}}}, {{{", ".join(momentum)}}}}},')
(HERE / "lr_scheduler_expected.inc").write_text("\n".join(lines) + "\n")
torch.save(states, HERE / "files" / "schedules.pt")
