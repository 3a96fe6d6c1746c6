#!/usr/bin/env python3
"""PyTorch's debug server of a rank: what it shows of this backend."""

import json
import os
import unittest
import urllib.request
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.debug

import ranks


def ask(port: int, handler: str) -> Any:
    with urllib.request.urlopen(f"http://localhost:{port}/handler/{handler}", data=b"", timeout=60) as answer:
        return answer.read().decode()


def look_at_a_rank_that_waits() -> tuple[list[str], Any, Any, str]:
    """What rank 0, which waits for rank 1, shows to rank 1: its handlers, state, calls and stacks."""
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    served = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    # A rank 0 would start PyTorch's frontend, too, whose packages may be missing.
    os.environ |= {"RANK": str(rank + 1), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(served.port)}
    torch.distributed.debug.start_debug_server()
    store.set(f"port{rank}", str(torch.distributed.debug._WORKER_SERVER.port))
    ports = [int(store.get(f"port{other}")) for other in range(2)]
    dist.barrier()
    if rank == 0:
        dist.all_reduce(torch.ones(3))
        return [], {}, {}, ""
    while not (state := json.loads(ask(ports[0], "paceline_state")))["groups"][0]["ranks"][0]["waits"]:
        pass
    with urllib.request.urlopen(f"http://localhost:{ports[0]}/handler/", timeout=60) as answer:
        names = json.load(answer)
    calls = json.loads(ask(ports[0], "fr_trace_json?backend=paceline"))
    stacks = ask(ports[0], "dump_traceback")
    own = json.loads(ask(ports[1], "paceline_state"))
    dist.all_reduce(torch.ones(3))
    return names, [state, own], calls, stacks


class Debug(unittest.TestCase):

    def test_a_rank_that_waits_is_shown_by_its_server(self) -> None:
        names, states, calls, stacks = ranks.run(look_at_a_rank_that_waits, "paceline", 2)[1]
        self.assertIn("paceline_state", names)
        for rank, state in enumerate(states):
            group, = state["groups"]
            self.assertEqual((group["rank"], group["size"]), (rank, 2))
            shown = [(one["rank"], one["call"], one["operation"], one["waits"]) for one in group["ranks"]]
            self.assertEqual(shown, [(0, 2, "all_reduce of 3 float32", True), (1, 1, "barrier", False)])
        self.assertEqual([entry["profiling_name"] for entry in calls["entries"]], ["paceline:all_reduce"])
        self.assertIn("look_at_a_rank_that_waits", stacks)  # Python's own handler


if __name__ == "__main__":
    unittest.main()
