"""The backend `paceline` for torch.distributed: shared memory between the ranks of a machine, and Gloo between machines.

No import is needed: once this package is installed,

    torch.distributed.init_process_group("paceline")

finds it, as does "cpu:paceline" beside a backend for other devices. `Options` is for `pg_options`.

Misuse raises `UsageError`, which is a ValueError and a RuntimeError; every other failure raises torch.distributed.DistBackendError.
The errors about other ranks are subclasses of the latter with the attributes `ranks`, `operation` and `sequence`: `PeerError`, and below
it `PeerLost`, `Timeout` and `Mismatch`.
"""

import os

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

_TORCH = "2.15"

if torch.__version__.split("+")[0].rsplit(".", 1)[0] != _TORCH:
    raise ImportError(
        f"this paceline was built for torch {_TORCH}, but torch is {torch.__version__}: "
        f"install torch=={_TORCH}.*, or a paceline built for torch {torch.__version__}")

# The extension does not load with another torch.
from paceline import _C  # noqa: E402
from paceline._C import Options, __version__  # noqa: E402
from paceline.ddp import DistributedDataParallel, replace_ddp  # noqa: E402
from paceline.errors import Mismatch, PeerError, PeerLost, Timeout, UsageError  # noqa: E402

__all__ = ["DistributedDataParallel", "Mismatch", "Options", "PeerError", "PeerLost", "Timeout", "UsageError", "__version__",
           "register", "replace_ddp", "replace_gloo", "tune_malloc"]


def _create(options: _c10d._DistributedBackendOptions,
            backend_options: _c10d.Backend.Options | None) -> _c10d.Backend:
    """Makes the backend of one group; torch.distributed calls it on each of the group's ranks.

    With "cpu:paceline,cuda:nccl" the options may be another backend's, which are ignored.
    """
    if backend_options is not None and not isinstance(backend_options, _c10d.Backend.Options):
        raise UsageError(f"pg_options is {backend_options!r}; expected paceline.Options, or options of another backend")
    if not isinstance(backend_options, Options):
        backend_options = Options()
    if not 0 <= options.group_rank < options.group_size:
        raise UsageError(f"rank is {options.group_rank} and world_size {options.group_size}; ranks are 0 to {options.group_size - 1}")
    backend = _C.create(
        store=options.store, rank=options.group_rank, size=options.group_size,
        timeout=options.timeout, group_name=options.group_id if options.global_ranks_in_group else "world",
        world_ranks=list(options.global_ranks_in_group),
        options=backend_options, reconfigurable=options.enable_reconfigure,
        world=_world_backend() if options.global_ranks_in_group else None)
    if not torch.cuda.is_available():  # otherwise these would apply to NCCL, too
        _set_up_torch()
    return backend


def _world_backend() -> _c10d.Backend | None:
    """The backend of the default group for the CPU, if it has one."""
    try:
        backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None
    while isinstance(backend, _c10d._ProcessGroupWrapper):  # with TORCH_DISTRIBUTED_DEBUG=DETAIL
        backend = backend.wrapped_pg
    return backend


def _set_up_torch() -> None:
    # DistributedDataParallel allocates its buckets from the backend only if this is 0.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    # Writing a trace delays the error by seconds. Without a variable for it, nobody asked for one.
    if not any(name.startswith(("TORCH_FR_DUMP", "TORCH_NCCL_D")) for name in os.environ):
        os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"


def register() -> None:
    """Registers the backend. The package's entry point for torch.distributed calls this."""
    dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])


def replace_gloo() -> None:
    """Makes the name "gloo" mean this backend on the CPU, in groups made from now on.

    For programs that accept only the names of torch's own backends; get_backend() still says "gloo". Calling it again changes
    nothing. `paceline run --as-gloo`, or the variable PACELINE_AS_GLOO=1, does it in programs that do not import paceline.
    """
    dist.Backend.register_backend("gloo", _create, extended_api=True, devices=["cpu"])
    # torch would not attach its flight recorder, since Gloo itself records.
    dist.distributed_c10d._FR_SELF_RECORDING_BACKENDS.discard("gloo")


def tune_malloc() -> bool:
    """Makes malloc keep the memory that a training step frees, for the next step, as `paceline run` does.

    For programs that another launcher starts. Returns False, and does nothing, if malloc is not glibc's.
    """
    return _C.tune_malloc()


if os.environ.get("PACELINE_AS_GLOO") == "1":
    replace_gloo()
