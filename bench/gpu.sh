#!/usr/bin/env bash
# Before the first call: build the paged baseline, build/fa2/vattn_fa2.so, by bench/gpu/build_fa2.sh (nvcc, no GPU, about
# fifteen minutes of one core), and carry it to the machine. Without it every paged row of flash-attn 2 is MISSING. For a
# Hopper, bench/gpu/fetch_fa3.sh fetches flash-attn 3, build/fa3/vllm_fa3.so.xz: carry that too.
#
# This builds vattn beside the packages of the Python that is there (torch with CUDA, transformers, cuda-python, pytest,
# pip, scikit-build-core, nanobind, CMake, ninja), without a network; then it runs bench.gpu, whose options it takes. A
# group of parts takes under ten minutes on one GPU. Without a GPU it runs over the stub driver.
#
# Half an hour on a machine, in calls of ten minutes, the most telling parts first:
#
#     timeout -k 15 575 bench/gpu.sh --first 1 --out DIR      then --first 2, 3, 4
#
# Without --first all parts run in that order: for a machine that is lent for less. What a killed call has not reached is
# named in the next one: bench/gpu.sh --out DIR PART ...
#
# Each leaves one tar and one table in DIR, and what it had measured until then if it is killed. VATTN_COMMIT is for the
# records of a checkout without .git, or with an older one. VATTN_GPU_KERNELS=NAME,... compares other kernels
# (docs/cuda.md).
#
#     bench/gpu.sh [--quick] [--out DIR] [--first N | PART ...]          PYTHON=... for another Python
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
venv=build/gpu-venv

if [[ " $* " == *" --help "* || " $* " == *" -h "* ]]; then
  sed -n '2,/^set /{/^#/s/^# \{0,1\}//p}' bench/gpu.sh
  echo
  exec "$python" -m bench.gpu --help
fi

started=$SECONDS
if ! "$venv/bin/python" -c 'import vattn._native' 2>/dev/null; then
  rm -rf "$venv"
  # Without pip: making one needs ensurepip, which Linux distributions leave out. That Python's own pip serves both.
  "$python" -m venv --system-site-packages --without-pip "$venv"
  # Where that Python is a venv itself, --system-site-packages means the one below it: name its packages too.
  "$python" -c 'import sys; print("\n".join(path for path in sys.path if path.endswith("-packages")))' \
    > "$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/parent.pth"
  "$venv/bin/python" -c 'import pip' || { echo "$python has no pip: install it, or name another PYTHON" >&2; exit 1; }
fi
# The kernels for CPUs take most of the build, and no part uses them on a GPU.
[ ! -e /dev/nvidiactl ] || export VATTN_KERNELS=portable
# Again where it is installed already: the sources may have changed, and the build directory makes it quick.
PATH="$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH" \
  "$venv/bin/python" -m pip install --quiet --no-build-isolation --no-deps --no-index --editable .
echo "built in $((SECONDS - started)) s"

PYTHONUNBUFFERED=1 exec "$venv/bin/python" -m bench.gpu "$@"

