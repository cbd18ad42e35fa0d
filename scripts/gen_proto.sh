#!/usr/bin/env bash
# Regenerate pdserve/pb/ from proto/. Usage: scripts/gen_proto.sh [OUT]  (OUT defaults to the repository root).
# The generator is deliberately old: code made by a new one cannot be imported under an older protobuf runtime,
# while code made by 1.71 imports under protobuf 5.29 to 7. It gets an environment of its own, because its protobuf
# is older than the one the product runs on.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
out=${1:-$root}
tools=${PDSERVE_PROTO_VENV:-$root/.venv-proto}
python=${PYTHON:-python3}
if [ ! -x "$tools/bin/protoc-gen-mypy" ]; then
  "$python" -m venv "$tools"
  "$tools/bin/pip" install --quiet --disable-pip-version-check \
    'grpcio-tools==1.71.2' 'mypy-protobuf==3.6.0' 'types-protobuf==5.29.1.20250315' 'setuptools<81'
fi
mkdir -p "$out/pdserve/pb"
touch "$out/pdserve/pb/__init__.py"
PATH="$tools/bin:$PATH" "$tools/bin/python" -m grpc_tools.protoc -I"$root/proto" \
  --python_out="$out" --grpc_python_out="$out" --mypy_out="quiet:$out" --mypy_grpc_out="quiet:$out" \
  "$root"/proto/pdserve/pb/*.proto
