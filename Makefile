# Short names for the commands of tools/ and CMake.

NPROC ?= 2
PREFIX ?= /usr/local
ARGS ?=

.PHONY: help run examples build test test-cuda fuzz lint docs python wheel conformance bench peers install clean

help:  ## print this help
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

run:  ## train the Fashion-MNIST example on NPROC=2 ranks, with DEVICE=cuda on a GPU; ARGS go to the example
	@DEVICE=$(DEVICE) tools/setup run
	@test -f build/release/build.ninja || cmake --preset release -DPACELINE_TESTS=OFF
	@cmake --build --preset release --target bin/paceline bin/fashion_mnist
	@build/release/bin/paceline run --nproc-per-node $(NPROC) build/release/bin/fashion_mnist --device $(or $(DEVICE),auto) $(ARGS)

examples:  ## build the examples into build/release/bin
	@tools/setup run
	@test -f build/release/build.ninja || cmake --preset release -DPACELINE_TESTS=OFF
	@cmake --build --preset release --target bin/paceline examples/all

build:  ## build everything
	@tools/setup test
	@tools/configure release
	@cmake --build --preset release

test:  ## run all tests, then the torch-free layers' tests under sanitizers
	@tools/setup test
	@tools/run_tests release asan tsan

test-cuda:  ## run the tests that need a CUDA device, and write build/cuda-report.json
	@DEVICE=cuda tools/setup test
	@tools/configure release
	@cmake --build --preset release --target cuda_test
	@tests/cuda/run

fuzz:  ## run each parser's fuzzer for SECONDS=30
	@tools/setup fuzz
	@tools/configure asan
	@cmake --build --preset asan --target fuzzers
	@tests/fuzz/run build/asan $(or $(SECONDS),30)

lint:  ## check format and includes; run clang-tidy, shellcheck and ruff
	@tools/setup lint
	@tools/configure dev
	@tools/lint

docs:  ## write the reference and these pages as a site into build/docs
	@tools/setup docs
	@tools/docs

python:  ## build the Python package, install it into .venv beside torch, and run its tests
	@tools/setup python
	@.venv/bin/pip install --quiet --no-build-isolation -C build-dir=$(CURDIR)/build/python .
	@python/tests/run
	@echo "installed into .venv: start programs with .venv/bin/python"

wheel:  ## build an sdist and a wheel for PyPI into build/dist, and test the wheel
	@tools/setup wheel
	@python/manylinux/build

conformance: python  ## run PyTorch's own tests on paceline and on Gloo; ARGS go to tests/conformance/run
	@.venv/bin/python -B tests/conformance/run $(ARGS)

bench: build  ## run benchmarks; ARGS go to paceline bench (default: collectives)
	@build/release/bin/paceline bench $(or $(ARGS),collectives)

peers:  ## fetch MPICH, Intel MPI and OpenMPI (150 MB), which bench then measures too
	@tools/setup peers
	@cmake --preset release
	@cmake --build --preset release

install:  ## install to PREFIX=/usr/local
	@tools/setup run
	@test -f build/release/build.ninja || cmake --preset release -DPACELINE_TESTS=OFF
	@cmake --build --preset release --target installed
	@cmake --install build/release --prefix $(PREFIX) >/dev/null
	@echo "installed to $(PREFIX): the command in $(PREFIX)/bin; for CMake, CMAKE_PREFIX_PATH=$(PREFIX)"

clean:  ## remove all builds, but not .deps
	@rm -rf build
