#!/usr/bin/env bash
# Fetches build/fa3/vllm_fa3.so.xz: flash-attn 3 (Hopper) out of vLLM's wheel for torch 2.11 and CUDA 13, of 280 MB. It is
# the kernel that vLLM runs on an H100, so the strongest paged baseline of `bench.gpu` there. Packed, so that it can be
# carried to a machine without a network (13 MB).
#
#     bench/gpu/fetch_fa3.sh      PYTHON=...
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
version=0.24.0
out=build/fa3
mkdir -p "$out"
"$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest "$out" \
  --platform manylinux_2_28_x86_64 "vllm==$version"
"$python" - "$out"/vllm-"$version"-*.whl "$out/vllm_fa3.so" <<'PYTHON'
import lzma, shutil, sys, zipfile
wheel, library = sys.argv[1:]
with zipfile.ZipFile(wheel).open("vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so") as source:
    with lzma.open(library + ".xz", "wb", preset=3) as target:
        shutil.copyfileobj(source, target)
PYTHON
rm -f "$out"/vllm-*.whl "$out/vllm_fa3.so"
echo "$out/vllm_fa3.so.xz: $(($(stat -c %s "$out/vllm_fa3.so.xz") / 1024)) KiB"
