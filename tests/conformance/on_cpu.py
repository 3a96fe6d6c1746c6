"""Runs tests that use GPUs without testing them on CPU tensors.

A request for a GPU gets the CPU instead. A test that needs more of a GPU than the device's name (streams, memory, NCCL) fails
with Gloo too, and is then not compared.
"""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def _names_gpu(device: Any) -> bool:
    if isinstance(device, bool):
        return False
    return isinstance(device, int) or str(device).split(":")[0] == "cuda"


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    pass


class OnCpu(TorchFunctionMode):
    """Makes a CPU tensor of each tensor for a GPU, and of each copy to a GPU."""

    def __torch_function__(self, function: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if _names_gpu(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0].clone()
        if function is torch.Tensor.to and len(args) > 1 and _names_gpu(args[1]):
            return function(args[0], "cpu", *args[2:], **kwargs, **({} if "copy" in kwargs else {"copy": True}))
        return function(*args, **kwargs)


def install(world_size: int) -> None:
    """Applies to this process, from now on."""
    from torch.testing._internal.distributed import distributed_test

    move, wrap = nn.Module.to, nn.parallel.DistributedDataParallel.__init__

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        kwargs = {name: "cpu" if name == "device" and _names_gpu(value) else value for name, value in kwargs.items()}
        return move(self, *("cpu" if _names_gpu(value) else value for value in args), **kwargs)

    def init(self: nn.Module, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        wrap(self, module, **kwargs)

    nn.Module.to = to
    nn.Module.cuda = lambda self, device=None: self
    nn.parallel.DistributedDataParallel.__init__ = init
    torch.cuda.set_device = torch.cuda.synchronize = _do_nothing
    torch.cuda.device = contextlib.nullcontext
    torch.cuda.current_device = lambda: 0
    distributed_test.init_multigpu_helper = lambda size, backend: {rank: [rank] for rank in range(size)}
    OnCpu().__enter__()
