#!/usr/bin/env python3
"""The environment of the processes that `paceline run` starts, against that of torchrun with the same flags."""

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
PACELINE = REPOSITORY / "build/release/bin/paceline"
TORCHRUN = Path(sys.executable).with_name("torchrun")

# Writes what it sees; fails before the last restart, but not before all ranks have written, since that ends them.
PROGRAM = """
import json, os, sys, time
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
def path(rank):
    return os.path.join(sys.argv[1], f"{rank} of start {restart}")
own = path(os.environ["RANK"])
with open(own + " incomplete", "w") as file:
    json.dump([sys.argv[2:], dict(os.environ)], file)
os.rename(own + " incomplete", own)
while not all(os.path.exists(path(rank)) for rank in range(int(os.environ["WORLD_SIZE"]))):
    time.sleep(0.01)
sys.exit(restart != os.environ["TORCHELASTIC_MAX_RESTARTS"])
"""

# docs/launching.md says why; the last is what a traceback leaves that torchrun has logged.
DIFFERENT = {"TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "TORCHINDUCTOR_CACHE_DIR"}
# Without a port, torchrun chooses these.
CHOSEN = {"MASTER_ADDR", "MASTER_PORT"}

# Flags, and variables. PORT is a free port, LOGS a directory.
CASES: dict[str, tuple[list[str], dict[str, str]]] = {
    "one": ([], {}),
    "a port": (["--master-port=PORT"], {}),
    "an endpoint": (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--nproc-per-node=2"], {}),
    "underscores": (["--nproc_per_node=2", "--master_port", "PORT", "--rdzv_id=job 7", "--node_rank", "0",
                     "--signals_to_handle", "SIGTERM,SIGUSR1", "--shutdown_timeout=5"], {}),
    "dashes": (["--nproc-per-node=2", "--master-port=PORT", "--rdzv-id", "job", "--master-addr", "localhost",
                "--log-dir", "LOGS", "-r", "0:3,1:1", "--tee=2", "--duplicate-stderr-filters", "x"], {}),
    "variables": ([], {"PET_NPROC_PER_NODE": "2", "PET_ROLE": "trainer", "PET_MASTER_PORT": "PORT", "PET_RDZV_ID": "job",
                       "PET_MAX_RESTARTS": "1", "PET_NO_PYTHON": "0", "PET_LOG_DIR": "LOGS", "PET_NNODES": "1"}),
    "restarts": (["--standalone", "--nproc-per-node=2", "--role", "a b", "--max-restarts=1", "--monitor-interval=0.1"], {}),
    "empty values": (["--master-port=PORT", "--rdzv-id=job", "--role=", "--log-dir=", "--local-ranks-filter=",
                      "--rdzv-conf=", "--log_line_prefix_template=", "--local-addr=", "--signals-to-handle="], {}),
    "virtual local ranks": (["--nproc-per-node=2", "--virtual-local-rank"], {}),
    "virtual local ranks of some devices": (["--nproc-per-node=2"],
                                            {"CUDA_VISIBLE_DEVICES": "5, GPU-1,2", "PET_VIRTUAL_LOCAL_RANK": "1"}),
    "virtual local ranks on ROCm": (["--nproc-per-node=2", "--virtual_local_rank"],
                                    {"CUDA_VISIBLE_DEVICES": "5,6", "HIP_VISIBLE_DEVICES": "2,1"}),
    "the user's own": (["--nproc-per-node=2"], {"OMP_NUM_THREADS": "3", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
                                                "CUDA_VISIBLE_DEVICES": "5,6"}),
    "run path": (["--nproc-per-node=2", "--run-path"], {}),
}


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


class Environments(dict[str, dict[str, str]]):
    """What each start of each rank saw, by `launcher`."""

    def __init__(self, launcher: list[str], flags: list[str], variables: dict[str, str]) -> None:
        inherited = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as temporary:
            seen, logs = Path(temporary, "seen"), Path(temporary, "logs")
            seen.mkdir()
            program = Path(temporary, "program.py")
            program.write_text(PROGRAM)

            def fill(text: str) -> str:
                return text.replace("PORT", self.port).replace("LOGS", str(logs))

            self.port = free_port()
            environment = inherited | {"LC_ALL": "C.UTF-8", "TMPDIR": temporary, "PYTHON_EXEC": sys.executable} | {
                name: fill(value) for name, value in variables.items()}
            self.process = subprocess.run(
                [*launcher, *map(fill, flags), str(program), str(seen), "an argument", "--nproc-per-node=9"],
                env=environment, capture_output=True, text=True, timeout=300)
            for file in seen.iterdir():
                arguments, self[file.name] = json.loads(file.read_text())
                assert arguments == ["an argument", "--nproc-per-node=9"], arguments
                self[file.name] = {name: self.without_chance(name, value, temporary)
                                   for name, value in self[file.name].items()}

    def without_chance(self, name: str, value: str, temporary: str) -> str:
        value = value.replace(temporary, "TMP")
        if value == self.port:
            return "PORT"
        return re.sub("^TMP/logs/job_[^/]+/", "TMP/logs/job_RANDOM/", value) if name.endswith("ERROR_FILE") else value


@unittest.skipUnless(PACELINE.exists() and TORCHRUN.exists(), f"needs {PACELINE} and {TORCHRUN}")
class Torchrun(unittest.TestCase):
    def test_sets_nothing_that_paceline_run_does_not(self) -> None:
        for name, (flags, variables) in CASES.items():
            with self.subTest(name):
                theirs = Environments([str(TORCHRUN)], flags, variables)
                ours = Environments([str(PACELINE), "run"], flags, variables)
                self.assertEqual(theirs.process.returncode, 0, theirs.process.stderr)
                self.assertEqual(ours.process.returncode, 0, ours.process.stderr)
                self.assertEqual(ours.keys(), theirs.keys())
                given = " ".join([*flags, *variables, *variables.values()])
                ignored = DIFFERENT - variables.keys()
                if "PORT" not in given:
                    ignored |= CHOSEN
                if "PORT" not in given and "endpoint" not in given:
                    ignored |= {"TORCHELASTIC_RUN_ID"}
                if "LOGS" not in given:
                    ignored |= {"TORCHELASTIC_ERROR_FILE"}
                for start, environment in theirs.items():
                    self.assertIn("TORCHELASTIC_RUN_ID", environment)
                    same = {key: value for key, value in environment.items() if key not in ignored}
                    self.assertEqual({key: ours[start].get(key) for key in same}, same, start)

    def test_refuses_the_devices_that_paceline_run_refuses(self) -> None:
        flags = ["--nproc-per-node=2", "--virtual-local-rank"]
        for launcher in ([str(TORCHRUN)], [str(PACELINE), "run"]):
            refused = Environments(launcher, flags, {"CUDA_VISIBLE_DEVICES": "5"})
            self.assertNotEqual(refused.process.returncode, 0)
            self.assertIn("CUDA_VISIBLE_DEVICES=5", refused.process.stderr)
            self.assertEqual(refused, {})


# Fails before the last restart, after which the agent's store has the keys of all starts before.
RESTARTED = """
import datetime, os, sys
import torch
import torch.distributed as dist
import paceline
dist.init_process_group("paceline", timeout=datetime.timedelta(seconds=60))
number = torch.ones(1)
dist.all_reduce(number, group=dist.new_group([0, 1]))
assert number.item() == 2
dist.barrier()
dist.destroy_process_group()
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] != os.environ["TORCHELASTIC_MAX_RESTARTS"])
"""


@unittest.skipUnless(TORCHRUN.exists(), f"needs {TORCHRUN}")
class Restarts(unittest.TestCase):
    def test_form_groups_in_the_store_of_the_processes_before(self) -> None:
        with tempfile.TemporaryDirectory(prefix="paceline-test-") as temporary:
            program = Path(temporary, "program.py")
            program.write_text(RESTARTED)
            ended = subprocess.run(
                [str(TORCHRUN), "--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0",
                 "--max-restarts=2", "--monitor-interval=0.1", str(program)], capture_output=True, text=True, timeout=300)
        self.assertEqual(ended.returncode, 0, ended.stderr)


if __name__ == "__main__":
    unittest.main()
