#!/usr/bin/env python3
"""Collectives and messages of Python objects."""

import unittest
from typing import Any

import torch.distributed as dist

import ranks


def mine() -> dict[str, Any]:
    return {"rank": dist.get_rank(), "text": "x" * 1000 * dist.get_rank()}


def all_gather() -> list[Any]:
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine())
    return gathered


def gather() -> list[Any] | None:
    root = dist.get_world_size() - 1
    gathered = [None] * dist.get_world_size() if dist.get_rank() == root else None
    dist.gather_object(mine(), gathered, dst=root)
    return gathered


def broadcast() -> list[Any]:
    objects = [mine(), {dist.get_rank()}, None]
    dist.broadcast_object_list(objects, src=dist.get_world_size() - 1)
    return objects


def scatter() -> list[Any]:
    given = [("for", rank) for rank in range(dist.get_world_size())] if dist.get_rank() == 0 else None
    received = [None]
    dist.scatter_object_list(received, given, src=0)
    return received


def send() -> list[Any]:
    """Each rank except the first sends to the one before it."""
    received = [None, None]
    if dist.get_rank() > 0:
        dist.send_object_list([mine(), dist.get_rank()], dst=dist.get_rank() - 1)
    if dist.get_rank() < dist.get_world_size() - 1:
        dist.recv_object_list(received, src=dist.get_rank() + 1)
    return received


class Objects(ranks.Case):
    def test_all_gather(self) -> None:
        self.equals_gloo(all_gather)

    def test_gather(self) -> None:
        self.equals_gloo(gather, sizes=(1, 3))

    def test_broadcast(self) -> None:
        self.equals_gloo(broadcast, sizes=(1, 3))

    def test_scatter(self) -> None:
        self.equals_gloo(scatter, sizes=(1, 3))

    def test_messages(self) -> None:
        self.equals_gloo(send, sizes=(1, 2, 4))


if __name__ == "__main__":
    unittest.main()
