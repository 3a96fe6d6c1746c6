"""The errors of the backend."""

from torch.distributed import DistBackendError

__all__ = ["Mismatch", "PeerError", "PeerLost", "Timeout", "UsageError"]


class UsageError(ValueError, RuntimeError):
    """An invalid argument, or a call that is not possible now. The group remains usable.

    A ValueError as from torch.distributed itself, and a RuntimeError as from Gloo.
    """


class PeerError(DistBackendError):
    """The base of the errors about other ranks. The group has failed; other groups remain usable."""

    ranks: list[int]
    """The ranks at fault, as global ranks in ascending order. Empty if they are not known."""

    operation: str
    """What this rank was doing: "all_reduce", "connect" and so on."""

    sequence: int
    """The number of that operation in its group, counted from 1; 0 if it has none."""


class PeerLost(PeerError):
    """A rank has ended or has left the group."""


class Timeout(PeerError):
    """A rank did not arrive within the timeout. As far as can be seen, it is alive."""


class Mismatch(PeerError):
    """The ranks made different calls: another operation, type, size, root or reduction."""
