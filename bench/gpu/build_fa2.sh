#!/usr/bin/env bash
# Builds build/fa2/vattn_fa2.so: flash-attn's decoding call for heads of 64 and 128 in bfloat16 on sm_90, as an operator
# of torch 2.11 (bench/gpu/fa2/ops.cpp). It is the paged baseline of `bench.gpu` where no flash-attn is installed.
#
# It needs nvcc 13, g++ and about fifteen minutes of one core; called again, it goes on where it stopped. Without arguments
# it downloads flash-attn's sources (8 MB) and torch's wheel for headers and symbols (530 MB); where there is no network,
# give both. Whatever torch it is built against is the one that it runs with. The first download takes a Python with torch
# (any), packaging, setuptools and wheel: flash-attn's setup.py imports them to say its own version.
#
#     bench/gpu/build_fa2.sh [flash_attn-2.8.3.post2.tar.gz [FOLDER OF torch]]     PYTHON=, NVCC=, JOBS=1
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
nvcc=${NVCC:-/usr/local/cuda/bin/nvcc}
cuda=$(dirname "$(dirname "$(readlink -f "$(command -v "$nvcc")")")")
out=build/fa2
version=2.8.3.post2
sources=$out/flash_attn-$version
sdist=${1:-$sources.tar.gz}
torch=${2:-$out/torch}
mkdir -p "$out"

if [ ! -f "$sdist" ]; then
  "$python" -c 'import packaging, setuptools, torch, wheel' || {
    echo "to fetch flash-attn, $python needs torch, packaging, setuptools and wheel; or name another PYTHON" >&2
    exit 1
  }
  FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE "$python" -m pip download --quiet --no-deps --no-binary :all: \
    --no-build-isolation --dest "$out" "flash-attn==$version"
fi
if [ ! -d "$sources" ]; then
  rm -rf "$sources.part" && mkdir "$sources.part"
  tar -xf "$sdist" -C "$sources.part" --strip-components 1
  mv "$sources.part" "$sources"
fi
if [ ! -d "$torch" ]; then
  "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --dest "$out" torch==2.11.0
  "$python" - "$out"/torch-2.11.0-*.whl "$out/unpacked" <<'PYTHON'
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
libraries = {f"torch/lib/lib{name}.so" for name in ("c10", "c10_cuda", "torch", "torch_cpu", "torch_cuda")}
wheel.extractall(sys.argv[2], [n for n in wheel.namelist() if n.startswith("torch/include/") or n in libraries])
PYTHON
  mv "$out/unpacked/torch" "$torch"
  rm -r "$out/unpacked" "$out"/torch-2.11.0-*.whl
fi

# What is switched off would double the kernels each time and is never asked for; windows and softcap remain.
flags=(
  -O3 -std=c++17 -gencode arch=compute_90,code=sm_90 --use_fast_math --expt-relaxed-constexpr --expt-extended-lambda
  -U__CUDA_NO_HALF_OPERATORS__ -U__CUDA_NO_HALF_CONVERSIONS__ -U__CUDA_NO_HALF2_OPERATORS__
  -U__CUDA_NO_BFLOAT16_CONVERSIONS__
  -DFLASHATTENTION_DISABLE_DROPOUT -DFLASHATTENTION_DISABLE_ALIBI -DFLASHATTENTION_DISABLE_UNEVEN_K
  -Xcompiler -fPIC,-fvisibility=hidden,-ffunction-sections
  -Ibench/gpu/fa2
)
for headers in "$sources"/csrc/{flash_attn,flash_attn/src,cutlass/include} "$torch"/include{,/torch/csrc/api/include}; do
  flags+=(-isystem "$headers") # theirs, so without warnings
done
compile() { # SOURCE OBJECT
  [ "$2" -nt "$1" ] && return
  local started=$SECONDS
  "$nvcc" "${flags[@]}" -c "$1" -o "$2.part"
  mv "$2.part" "$2"
  echo "$(basename "$2"): $((SECONDS - started)) s"
}
objects=("$out/ops.o")
compile bench/gpu/fa2/ops.cpp "$out/ops.o"
for kernel in "$sources"/csrc/flash_attn/src/flash_fwd_{,split_}hdim{64,128}_bf16_{,causal_}sm80.cu; do
  object=$out/$(basename "$kernel" .cu).o
  objects+=("$object")
  while [ "$(jobs -pr | wc -l)" -ge "${JOBS:-1}" ]; do wait -n; done
  compile "$kernel" "$object" &
done
while [ -n "$(jobs -p)" ]; do wait -n; done

# Sections that nothing refers to go (the backward pass, for one). Then every symbol that is still missing has to be in
# one of these libraries: -z defs makes the link fail otherwise.
g++ -shared -o "$out/vattn_fa2.so" "${objects[@]}" -Wl,--gc-sections,--exclude-libs,ALL,-z,defs \
  -Wl,--allow-shlib-undefined "-L$torch/lib" "-L$cuda/lib64" \
  -Wl,--no-as-needed -lc10 -lc10_cuda -ltorch_cpu -ltorch_cuda -lcudart
strip "$out/vattn_fa2.so"

echo "$out/vattn_fa2.so: $(($(stat -c %s "$out/vattn_fa2.so") / 1024)) KiB"
"$python" - "$out/vattn_fa2.so" 2>/dev/null <<'PYTHON' || echo "$python cannot load it: that takes torch 2.11 with CUDA"
import sys, torch
torch.ops.load_library(sys.argv[1])
print(torch.ops.vattn_fa2.fwd_kvcache.default._schema)
PYTHON
