#!/usr/bin/env bash
# Check and measure training on one GPU, within nine minutes and without a network:
#
#     bash benchmarks/gpu.sh [--tiny]
#
# The report, the measurements and the log are in the folder $OUT (default: out/benchmarks/gpu), see benchmarks/gpu.py.
# The Python is $PYTHON, or python3 if it has PyTorch, or .venv/bin/python. The script installs only the
# wheels in out/wheels, into out/site. On a machine with a network, the next command puts wheels (6 MB) for Python
# 3.12 on Linux into out/wheels: DeepSpeed, and those of its dependencies that a Python with Accelerate may lack.
#
#     python3 -m pip wheel --no-deps --wheel-dir out/wheels deepspeed==0.19.8 hjson gguf==0.19.0 &&
#     python3 -m pip download --no-deps --only-binary :all: --dest out/wheels --python-version 3.12 \
#         --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 pydantic==2.14.4 pydantic-core==2.50.5 annotated-types \
#         typing-inspection typing-extensions einops msgpack ninja py-cpuinfo sentencepiece==0.2.3
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
has_torch='import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
[ -n "${PYTHON:-}" ] || python3 -c "$has_torch" || python=.venv/bin/python
exec "$python" -m benchmarks.gpu "$@"
