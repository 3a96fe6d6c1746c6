"""The backend `paceline` for torch.distributed: shared memory between the ranks of one machine.

Nothing has to be imported: once this package is installed,

    torch.distributed.init_process_group("paceline")

finds it, as does "cpu:paceline" beside a backend for other devices. Errors are those of
torch.distributed; a DistBackendError about other ranks has `ranks` (the ones at fault, by their
numbers in the world), `operation` and `sequence`.
"""

import torch
import torch.distributed as dist

_TORCH = "2.15"

if torch.__version__.split("+")[0].rsplit(".", 1)[0] != _TORCH:
    raise ImportError(
        f"this paceline is built for torch {_TORCH}, and this is torch {torch.__version__}: "
        f"install torch=={_TORCH}.*, or a paceline built for this one")

from paceline import _C  # noqa: E402 - the extension does not load beside another torch

Options = _C.Options
"""For `pg_options`: `staging_bytes` is what all staging buffers of a group may take together."""

__all__ = ["Options", "register"]


def _create(options: "dist.distributed_c10d._DistributedBackendOptions",
            backend_options: "dist.distributed_c10d.Backend.Options | None",
            ) -> "dist.distributed_c10d.Backend":
    if not isinstance(backend_options, Options):
        backend_options = Options()
    return _C.create(
        store=options.store, rank=options.group_rank, size=options.group_size,
        timeout=options.timeout, group_name=options.group_id,
        world_ranks=list(options.global_ranks_in_group),
        staging_bytes=backend_options.staging_bytes)


def register() -> None:
    """Makes the backend known to torch.distributed, which calls this by itself."""
    dist.Backend.register_backend("paceline", _create, extended_api=True, devices=["cpu"])
