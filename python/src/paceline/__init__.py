"""The backend `paceline` for torch.distributed: shared memory between the ranks of one machine.

Nothing has to be imported: once this package is installed,

    torch.distributed.init_process_group("paceline")

finds it, as does "cpu:paceline" beside a backend for other devices. `Options` is for `pg_options`.

Misuse raises ValueError, everything else torch.distributed.DistBackendError. One that is about other ranks has
`ranks` (those at fault, by their numbers in the world), `operation` (what this rank was doing) and `sequence` (the number
of that call in its group).
"""

import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as _c10d

_TORCH = "2.15"

if torch.__version__.split("+")[0].rsplit(".", 1)[0] != _TORCH:
    raise ImportError(
        f"this paceline is built for torch {_TORCH}, and this is torch {torch.__version__}: "
        f"install torch=={_TORCH}.*, or a paceline built for this one")

from paceline import _C  # noqa: E402 - the extension does not load beside another torch

if TYPE_CHECKING:

    class Options(_c10d.Backend.Options):
        """What a group can be told when it is made, as `pg_options`."""

        staging_bytes: int
        """What the staging buffers of all ranks of the group may take together."""

        def __init__(self) -> None: ...

else:
    Options = _C.Options

__all__ = ["Options", "register"]


def _create(options: "dist.distributed_c10d._DistributedBackendOptions",
            backend_options: _c10d.Backend.Options | None) -> _c10d.Backend:
    """Makes the backend of one group; torch.distributed calls it on each of the group's ranks.

    Options of another backend, which "cpu:paceline,cuda:nccl" may bring, count as none.
    """
    if not isinstance(backend_options, Options):
        backend_options = Options()
    if options.enable_reconfigure:
        raise ValueError(
            "enable_reconfigure=True: the backend paceline cannot exchange the ranks of a group that exists. Make a new "
            "group of the ranks that are there, with enable_reconfigure=False")
    backend = _C.create(
        store=options.store, rank=options.group_rank, size=options.group_size,
        timeout=options.timeout, group_name=options.group_id,
        world_ranks=list(options.global_ranks_in_group),
        staging_bytes=backend_options.staging_bytes)
    if not torch.cuda.is_available():  # or they would be NCCL's settings, too
        _set_up_torch()
    return backend


def _set_up_torch() -> None:
    # Unless this is 0, DistributedDataParallel does not ask its backend for the memory of its buckets.
    os.environ.setdefault("DDP_DISABLE_COMM_MEM", "0")
    # Without a word about where, nobody looks for a trace, which takes seconds to write before the error is raised.
    if not any(name.startswith(("TORCH_FR_DUMP", "TORCH_NCCL_D")) for name in os.environ):
        os.environ["TORCH_FR_DUMP_ON_TIMEOUT"] = "0"


def register() -> None:
    """Makes the backend known to torch.distributed, which calls this by itself: it is the package's entry point."""
    dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
