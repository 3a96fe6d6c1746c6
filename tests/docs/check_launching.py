#!/usr/bin/env python3
"""Runs the commands of docs/launching.md on two machines of network namespaces.

    on_machines 2 tests/docs/check_launching.py PAGE PACELINE TRAIN

A block of shell commands runs on the first machine. Lines that end with "# on ADDRESS" or "# on each" run there, all at
once, after the lines before them. `./train` is TRAIN, and has to come to the parameters of a single process.

This program is also srun, scontrol, docker, and the remote shell of mpirun, if it is called by that name: it starts what
they start, where they do, with the variables that they set. It does the same with the manifests for Kubernetes.
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap

import yaml

BLOCK = re.compile(r"^```(sh|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"\s+# on (each|[\d.]+)$")
RESULT = re.compile(r"ranks=(\d+) norms=(.*)")
HOSTS = """\
127.0.0.1 localhost
10.0.0.1 node1 machine0 train-0.train
10.0.0.2 node2 machine1 train-1.train
"""
TIMEOUT = 120


def on(machine, command):
    """The command as it runs on a machine where /etc/hosts is ours."""
    hosts = os.environ["CHECKED_HOSTS"]
    return [f"machine{machine}", "sh", "-c", f'mount --bind {hosts} /etc/hosts; exec "$@"', "sh", *command]


def run_together(commands, environments=None):
    """Runs commands side by side; their output, and the first exit code that is not 0."""
    environments = environments or [{}] * len(commands)
    with contextlib.ExitStack() as stack:
        processes = []
        for command, more in zip(commands, environments):
            process = subprocess.Popen(
                command, env=os.environ | more, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
            processes.append(stack.enter_context(process))
        output = "".join(process.communicate(timeout=TIMEOUT)[0] for process in processes)
    return output, next((process.returncode for process in processes if process.returncode != 0), 0)


def run_shell(block):
    """Runs a block of shell commands."""
    flags = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\d+)$", block, re.MULTILINE))
    batch = {"SLURM_" + name.upper().replace("-", "_").replace("NODES", "NNODES"): flags[name] for name in flags}
    lines = block.replace("\\\n", "").splitlines()
    places = [PLACE.search(line) for line in lines]
    before = "\n".join(line for line, place in zip(lines, places) if not place)
    output, code = run_together([on(0, ["bash", "-euc", before])], [batch])
    placed = [
        on(machine, ["bash", "-euc", line])
        for line, place in zip(lines, places)
        for machine in (0, 1)
        if place and place[1] in ("each", f"10.0.0.{machine + 1}")
    ]
    more, code_of_placed = run_together(placed)
    return output + more, code or code_of_placed


def run_pods(job, container):
    """Starts a pod of an Indexed Job on each machine."""
    commands, environments = [], []
    for index in range(job["spec"]["completions"]):
        environment = {"JOB_COMPLETION_INDEX": str(index)}
        environment |= {one["name"]: one.get("value", "what the secret holds") for one in container["env"]}
        words = [re.sub(r"\$\((\w+)\)", lambda found, its=environment: its[found[1]], word) for word in container["command"]]
        commands.append(on(index, words))
        environments.append(environment)
    return run_together(commands, environments)


def run_manifest(text, jobs):
    """Runs the Job of a manifest, or the last one with another container."""
    documents = list(yaml.safe_load_all(text))
    jobs += [document for document in documents if document.get("kind") == "Job"]
    container = jobs[-1]["spec"]["template"]["spec"]["containers"][0]
    if documents[-1].get("kind") != "Job":
        container = container | documents[-1]
    return run_pods(jobs[-1], container)


def check_result(output, train):
    """What is wrong with a training's output; empty if nothing is."""
    results = RESULT.findall(output)
    if len(results) != 1 or int(results[0][0]) < 2:
        return f"expected the result of one world of several ranks, got {results}"
    ranks, norms = results[0]
    alone = subprocess.run([train, "alone", ranks], capture_output=True, text=True, check=True)
    expected = RESULT.search(alone.stdout)[2].split()
    pairs = list(zip(map(float, expected), map(float, norms.split()), strict=True))
    return "" if all(abs(got / one - 1) < 1e-12 for one, got in pairs) else f"parameters differ: {pairs}"


def check_block(kind, block, jobs, train):
    """Runs a block in a directory of its own; what is wrong, empty if nothing is."""
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)
        os.environ["HOME"] = directory
        pathlib.Path(".zsh/completions").mkdir(parents=True)
        backend = "gloo" if kind == "yaml" or re.search(r"nnodes|nodes|node1|# on ", block) else "paceline"
        pathlib.Path("train").write_text(f"#!/bin/sh\nexec {train} {backend}\n")
        os.chmod("train", 0o700)
        output, code = run_manifest(block, jobs) if kind == "yaml" else run_shell(block)
        os.chdir("/")
    if code != 0:
        return f"exit code {code}\n{output}"
    return check_result(output, train) if "./train" in block else ""


def srun():
    """Starts tasks as srun does."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodes", type=int, default=os.environ.get("SLURM_NNODES"))
    parser.add_argument("--ntasks-per-node", type=int, default=os.environ.get("SLURM_NTASKS_PER_NODE"))
    parser.add_argument("--cpus-per-task")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    flags = parser.parse_args()
    tasks = flags.nodes * flags.ntasks_per_node
    places = [(rank, rank // flags.ntasks_per_node, rank % flags.ntasks_per_node) for rank in range(tasks)]
    output, code = run_together(
        [on(node, flags.program) for _, node, _ in places],
        [
            {
                "SLURM_JOB_ID": "77",
                "SLURM_STEP_ID": "0",
                "SLURM_NNODES": str(flags.nodes),
                "SLURM_NTASKS": str(tasks),
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(local_rank),
                "SLURM_NODEID": str(node),
                "SLURM_STEP_NUM_TASKS": str(tasks),
                "SLURM_STEP_NUM_NODES": str(flags.nodes),
                "SLURM_STEP_TASKS_PER_NODE": f"{flags.ntasks_per_node}(x{flags.nodes})",
                "SLURM_STEP_NODELIST": f"node[1-{flags.nodes}]",
            }
            for rank, node, local_rank in places
        ],
    )
    print(output)
    return code


def scontrol():
    """`scontrol show hostnames`"""
    print("node1\nnode2")
    return 0


def docker():
    """`docker run`: the command as process 1."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run")
    parser.add_argument("--rm", action="store_true")
    parser.add_argument("--cpus")
    parser.add_argument("--network")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    command = parser.parse_args().command
    os.execvp("unshare", ["unshare", "--pid", "--fork", "--kill-child", "--ipc", "--mount-proc", *command])


def mpirun():
    """The real one, which finds the other machine by remote_shell."""
    shell = shutil.which("remote_shell")
    if "-hosts" in sys.argv:
        command = ["mpirun.mpich", "-launcher", "ssh", "-launcher-exec", shell, "-iface", "eth0"]
    else:
        command = ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", shell]
    os.execvp(command[0], command + sys.argv[1:])


def remote_shell():
    """HOST COMMAND..., after flags of ssh."""
    at = next(i for i, word in enumerate(sys.argv) if word in ("node1", "node2"))
    command = on(int(sys.argv[at][-1]) - 1, ["sh", "-c", " ".join(sys.argv[at + 1 :])])
    os.execvp(command[0], command)


STAND_INS = (srun, scontrol, docker, mpirun, remote_shell)


def main(page, paceline, train):
    jobs = []
    failed = 0
    with tempfile.TemporaryDirectory() as stand_ins:
        for stand_in in STAND_INS:
            os.symlink(pathlib.Path(__file__).resolve(), f"{stand_ins}/{stand_in.__name__}")
        os.symlink(paceline, f"{stand_ins}/paceline")
        os.environ["PATH"] = f"{stand_ins}:{os.environ['PATH']}"
        os.environ["CHECKED_HOSTS"] = f"{stand_ins}/hosts"
        pathlib.Path(f"{stand_ins}/hosts").write_text(HOSTS)
        blocks = BLOCK.findall(pathlib.Path(page).read_text())
        for kind, block in blocks:
            if "mpirun" in block and not (shutil.which("mpirun.mpich") and shutil.which("mpirun.openmpi")):
                print(f"skipped without mpirun.mpich and mpirun.openmpi:\n{block}")
                continue
            problem = check_block(kind, block, jobs, train)
            if problem:
                print(f"{page}:\n{textwrap.indent(block, '    ')}{problem}")
                failed += 1
    if not blocks:
        sys.exit(f"{page} has no commands")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    name = pathlib.Path(sys.argv[0]).name
    for stand_in in STAND_INS:
        if name == stand_in.__name__:
            sys.exit(stand_in())
    main(*sys.argv[1:])
