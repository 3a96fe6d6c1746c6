#!/usr/bin/env python3
"""Messages between two ranks."""

import unittest

import torch
import torch.distributed as dist

import ranks

LENGTHS = (0, 1, 1000, 300_000)  # none, a few, and more than the buffers hold


def content(sender: int, length: int) -> torch.Tensor:
    return torch.arange(length) * 10 + sender


def pass_on() -> list[torch.Tensor]:
    """A ring in one batch; all ranks send before any rank receives."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = [torch.empty(length, dtype=torch.int64) for length in LENGTHS]
    sends = [dist.P2POp(dist.isend, content(rank, length), (rank + 1) % size) for length in LENGTHS]
    receives = [dist.P2POp(dist.irecv, tensor, (rank - 1) % size) for tensor in received]
    for work in dist.batch_isend_irecv(sends + receives):
        work.wait()
    return received


def receive_from_anywhere() -> list[tuple[int, torch.Tensor]]:
    if dist.get_rank() > 0:
        dist.send(content(dist.get_rank(), 1000), 0)
        return []
    received = []
    for _ in range(1, dist.get_world_size()):
        tensor = torch.empty(1000, dtype=torch.int64)
        received.append((dist.recv(tensor), tensor))
    return sorted(received, key=lambda pair: pair[0])


def receive_by_tag() -> list[torch.Tensor]:
    """Receives in another order than sent, into every second element."""
    if dist.get_rank() == 1:
        for tag in (1, 2, 3):
            dist.send(content(tag, 1000), 0, tag=tag)
        return []
    received = []
    for tag in (3, 1, 2):
        wide = torch.zeros(2000, dtype=torch.int64)
        dist.recv(wide[::2], 1, tag=tag)
        received.append(wide)
    return received


def answer_in_callbacks() -> torch.Tensor:
    """The callback of a receive's future sends the tensor back."""
    if dist.get_rank() == 1:
        sent, echo = content(1, 1000), torch.empty(1000, dtype=torch.int64)
        dist.send(sent, 0)
        dist.recv(echo, 0)
        return echo
    tensor = torch.empty(1000, dtype=torch.int64)
    answered = dist.irecv(tensor, 1).get_future().then(lambda future: dist.isend(future.value()[0] + 1, 1))
    answered.wait().wait()
    return tensor


def receive_while_reducing() -> tuple[torch.Tensor, torch.Tensor]:
    """Messages and collectives are independent: ranks may call them in different orders."""
    one, received = torch.ones(5), torch.empty(1000, dtype=torch.int64)
    if dist.get_rank() == 0:
        receiving = dist.irecv(received, 1)
        dist.all_reduce(one)
        receiving.wait()
    else:
        dist.all_reduce(one)
        dist.send(content(1, 1000), 0)
        received = content(1, 1000)
    return one, received


class Messages(ranks.Case):
    def test_batch(self) -> None:
        for size in (2, 3, 4):
            for rank, received in enumerate(ranks.run(pass_on, self.backend, size)):
                self.assert_same(received, [content((rank - 1) % size, length) for length in LENGTHS])

    def test_any_source(self) -> None:
        for size in (2, 4):
            received = ranks.run(receive_from_anywhere, self.backend, size)[0]
            self.assert_same(received, [(rank, content(rank, 1000)) for rank in range(1, size)])

    def test_tags(self) -> None:
        for tag, wide in zip((3, 1, 2), ranks.run(receive_by_tag, self.backend, 2)[0], strict=True):
            self.assert_same([wide[::2], wide[1::2]], [content(tag, 1000), torch.zeros(1000, dtype=torch.int64)])

    def test_a_callback_that_sends(self) -> None:
        received, echo = ranks.run(answer_in_callbacks, self.backend, 2)
        self.assert_same([received, echo], [content(1, 1000), content(1, 1000) + 1])

    def test_order_against_a_collective_is_free(self) -> None:
        self.assert_same(ranks.run(receive_while_reducing, self.backend, 2), [(torch.full((5,), 2.0), content(1, 1000))] * 2)


if __name__ == "__main__":
    unittest.main()
