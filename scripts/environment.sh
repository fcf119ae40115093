# run_accelerate.sh and run_tests.sh source this file with a requirements file as argument. "$python" becomes $PYTHON,
# whatever versions it has. Without PYTHON it becomes the active Python or that of .venv, if it has exactly the pinned
# versions; otherwise this file installs them into .venv.

fail() { echo "error: $1" >&2; exit 2; }
requirements=$1
supported='import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))'
if [ -n "${PYTHON:-}" ]; then
  python=$(command -v "$PYTHON") || fail "PYTHON=$PYTHON: no such program"
  "$python" -c "$supported" || fail "PYTHON=$PYTHON: Python 3.10 to 3.13 is needed"
  "$python" scripts/check_pins.py --any_version "$requirements" || exit 2
else
  for python in python python3 .venv/bin/python ""; do
    [ -z "$python" ] || ! "$python" scripts/check_pins.py "$requirements" >/dev/null 2>&1 || break
  done
fi
if [ -z "$python" ]; then
  [ "${NUM_MACHINES:-1}" = 1 ] ||
    fail "several machines would install into .venv at the same time; run this once: python3 -m venv .venv && .venv/bin/python -m pip install -r $requirements"
  for base in python3 python3.13 python3.12 python3.11 python3.10 ""; do
    [ -n "$base" ] || break
    "$base" -c "$supported" 2>/dev/null && break
  done
  [ -n "$base" ] || fail "Python 3.10 to 3.13 is needed; set PYTHON=/path/to/python, which then needs the packages of $requirements"
  # PyPI's PyTorch is built for CUDA 13.0: it needs driver 580 or newer, and a GPU of Turing or newer (not V100).
  query() { nvidia-smi --query-gpu="$1" --format=csv,noheader 2>/dev/null; }
  # Old drivers do not know compute_cap. If both queries fail, ignore their output: it is an error message.
  gpus=$(query driver_version,compute_cap) || gpus=$(query driver_version) || gpus=
  while [ -n "${CUDA_VISIBLE_DEVICES-all}" ] && [ ! -e .venv ] && IFS= read -r gpu && [ -n "$gpu" ]; do
    capability=${gpu##* }
    ((${gpu%%.*} >= 580)) && ((${capability/./} >= 75)) ||
      fail "PyPI's PyTorch needs an NVIDIA driver from 580 on and compute capability from 7.5 on; a GPU here has driver ${gpu/, /, capability }. Update the driver, or first install the build for CUDA 12.6: $base -m venv .venv && .venv/bin/python -m pip install $(grep ^torch== requirements.txt) --index-url https://download.pytorch.org/whl/cu126; or train on the CPU: CUDA_VISIBLE_DEVICES= before the command"
  done <<<"$gpus"
  echo "installing the packages of $requirements into .venv, once (on Linux PyTorch includes several GB of CUDA)"
  "$base" -m venv .venv ||
    fail "$base cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"
  python=.venv/bin/python
  "$python" -m pip install --quiet --disable-pip-version-check -r "$requirements" ||
    fail "pip could not install $requirements; see its message above"
fi
python=$(command -v "$python")
export TYPED_PATH="$PATH" # the PATH of the commands that the user will type
# DeepSpeed compiles with tools such as ninja, which it searches for on PATH.
export PATH="$(cd "$(dirname "$python")" && pwd):$PATH"
