#!/usr/bin/env python3
"""Checks the #include lines against the order of the layers in src/CMakeLists.txt.

    tools/check_layers.py [ROOT]

Prints one line per violation and exits with 1 if there is any.
"""

import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def listed(name):
    """A list that src/CMakeLists.txt sets."""
    text = (ROOT / "src" / "CMakeLists.txt").read_text()
    return re.search(rf"set\({name} ([a-z ]+)\)", text)[1].split()


# A layer includes itself and those before it; `shm`, `net`, `launch` and `trace` stand side by side,
# and so do `internode` and `nodes`. The library is built without `nodes`.
LIBRARY = listed("torch_free_layers") + listed("torch_layers")
MAY_INCLUDE = {layer: set(LIBRARY[:i + 1]) for i, layer in enumerate(LIBRARY)}
for beside in ("shm", "net", "launch", "trace"):
    MAY_INCLUDE[beside] = {"base", beside}
MAY_INCLUDE["internode"] = {"base", "shm", "net", "internode"}
MAY_INCLUDE["mpi"] = {"base", "shm", "internode", "mpi"}
MAY_INCLUDE["nodes"] = {"base", "net", "launch", "nodes"}
for layer in listed("torch_layers"):
    MAY_INCLUDE[layer] -= {"net", "nodes"}
MAY_INCLUDE |= {
    "apps/paceline/report": {"base", "trace", "apps/paceline/report"},
    "apps/paceline/top": {"base", "launch", "trace", "apps/paceline/report", "apps/paceline/top"},
    "apps/paceline": {"base", "net", "launch", "nodes", "trace", "apps/paceline/report",
                      "apps/paceline/top", "apps/paceline"},
    "apps/doctor": {*LIBRARY, "apps/doctor"},
    "models": {"models"},
    "drawing": {"drawing"},
    "examples": {"models", "drawing", "examples"},
    "benchmarks": {*LIBRARY, "models", "drawing", "benchmarks"},
    "python": {*LIBRARY, "python"},
    "public": {"public"},
}
SEES_PUBLIC_API = {"models", "examples"}
TORCH_FREE = {*listed("torch_free_layers"), "drawing", "apps/paceline", "apps/paceline/report",
              "apps/paceline/top"}

TOP = ["include", "src", "apps", "models", "drawing", "python", "examples", "benchmarks", "tests"]
INCLUDE_DIRECTORIES = ["include", "src", "apps/paceline",
                       "benchmarks/paceline-bench", "apps/doctor", "", "tests"]
INCLUDE = re.compile(r'^\s*#\s*include\s*["<]([^">]+)[">]', re.MULTILINE)
OTHER_SUFFIXES = {".c", ".cc", ".cxx", ".c++", ".hh", ".hpp", ".hxx", ".inl", ".ipp"}
TORCH = re.compile(r"(torch|ATen|c10|caffe2)/")


def sources(root, suffixes=frozenset({".h", ".cpp"})):
    """The C++ files of the project, relative to root."""
    for top in TOP:
        for path in sorted((root / top).rglob("*")):
            if path.suffix in suffixes:
                yield path.relative_to(root)


@functools.cache
def includes(root, path):
    """What a file includes: [(line, name as written, path relative to root or None if not ours)]."""
    text = (root / path).read_text()
    found = []
    for match in INCLUDE.finditer(text):
        name = match[1]
        places = [path.parent, *map(pathlib.Path, INCLUDE_DIRECTORIES)]
        ours = next((p / name for p in places if (root / p / name).is_file()), None)
        found.append((text.count("\n", 0, match.start(1)) + 1, name, ours))
    return found


def closure(root, path):
    """The file and every file of ours that it includes, also through others."""
    seen, pending = set(), [path]
    while pending:
        file = pending.pop()
        if file not in seen:
            seen.add(file)
            pending += [ours for _, _, ours in includes(root, file) if ours]
    return seen


def reached_names(root, path):
    """What the file includes, also through files of ours: names as written."""
    return {name for file in closure(root, path) for _, name, _ in includes(root, file)}


def layer_of(path):
    parts = path.parts
    if parts[0] == "src":
        return parts[1]
    for app in ("apps/paceline/report", "apps/paceline/top", "apps/paceline", "apps/doctor"):
        if path.is_relative_to(app):
            return app
    return "public" if parts[0] == "include" else parts[0]


def implementing_layer(root, header):
    """The layer of a public header: the one with the source of that name, base if there is none."""
    found = [layer for layer in LIBRARY if list((root / "src" / layer).rglob(f"{header.stem}.cpp"))]
    return found[0] if found else "base"


def complaint(root, source, target):
    """Why `source` must not include `target`, or None if it may."""
    layer, other = layer_of(source), layer_of(target)
    if layer == "tests":
        return None
    if other == "public":
        if layer == "public" or layer in SEES_PUBLIC_API:
            return None
        other = implementing_layer(root, target)
    if other in MAY_INCLUDE[layer]:
        return None
    return f"{layer} must not include {other}"


def violations(root):
    for other in sources(root, OTHER_SUFFIXES):
        yield f"{other}:1: ends in {other.suffix}; C++ files here end in .h or .cpp"
    for source in sources(root):
        layer = layer_of(source)
        if layer != "tests" and layer not in MAY_INCLUDE:
            yield f"{source}:1: no layer is called {layer}; src/CMakeLists.txt lists them"
            continue
        for line, name, target in includes(root, source):
            why = complaint(root, source, target) if target else None
            if layer in TORCH_FREE:
                names = [name, *(reached_names(root, target) if target else ())]
                if any(map(TORCH.match, names)):
                    why = f"{layer} is free of torch"
            if why:
                yield f"{source}:{line}: includes {name}, but {why}"


def main():
    root = pathlib.Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    if not any(sources(root)):
        sys.exit(f"{root} has no C++ files in {', '.join(TOP)}")
    found = list(violations(root))
    print(*found, sep="\n", end="\n" if found else "")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
