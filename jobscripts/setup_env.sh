#!/usr/bin/env bash
# Everything lpnet needs, in .venv of this repository: Python packages, MPI, h5py on parallel HDF5.
#
#   bash jobscripts/setup_env.sh
#
# Debian or Ubuntu as root: what is missing comes from apt. Elsewhere: load the modules of a Python >= 3.11, an
# MPI and a parallel HDF5 first; the script says what it does not find. A second call takes a second.
#
#   LPNET_PYTHON       the Python to use                          (default: python3, then python3.14 ... python3.11)
#   LPNET_TORCH_INDEX  package index of torch's CPU wheels        (default: pip's own, which may bring a CUDA build)
#   LPNET_HDF5=serial  do without parallel HDF5: h5py's own wheel; checkpoints are then written rank by rank
#   HDF5_DIR           parallel HDF5: the folder with include/ and lib/
#   PIP_*              as pip has them
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
constraints=$root/jobscripts/constraints.txt
stamp=$venv/.lpnet-stamp
parallel_hdf5=1
[[ ${LPNET_HDF5:-} == serial ]] && parallel_hdf5=0

say() { printf 'setup_env: %3d s  %s\n' "$SECONDS" "$*"; }
die() {
    printf 'setup_env: %s\n' "$@" >&2
    exit 1
}

[[ ! -L $venv ]] || die "$venv is a link to $(readlink "$venv"): this would make that environment anew; remove the link first"

# One set-up at a time in a checkout; a file system without locks goes without.
exec 9<"${BASH_SOURCE[0]}"
if command -v flock >/dev/null; then flock 9 2>/dev/null || true; fi

# From inside the activated environment the base Python must be found, not the environment's own.
PATH=$(printf '%s' "$PATH" | tr ':' '\n' | grep -vxF "$venv/bin" | paste -sd ':')
unset VIRTUAL_ENV PYTHONHOME

# What is there

find_python() {
    local candidate
    for candidate in ${LPNET_PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

python_can() { # build an environment and compile against its headers
    "$1" -c 'import ensurepip, os, sysconfig, venv; assert os.path.exists(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null
}

compiles() { echo 'int main(void) { return 0; }' | mpicc -x c -o /dev/null - 2>/dev/null; }

is_parallel_hdf5() { # INCLUDE LIB
    grep -qsE '^#define +H5_HAVE_PARALLEL +1' "$1"/H5pubconf*.h && compgen -G "$2/libhdf5.*" >/dev/null
}

# Sets hdf5_include and hdf5_lib: HDF5_DIR, else pkg-config, else h5pcc, else Debian's folders.
find_hdf5() {
    local flavour=openmpi package lib words
    if [[ -n ${HDF5_DIR:-} ]]; then
        for lib in lib lib64; do
            hdf5_include=$HDF5_DIR/include hdf5_lib=$HDF5_DIR/$lib
            is_parallel_hdf5 "$hdf5_include" "$hdf5_lib" && return 0
        done
        return 1
    fi
    if mpicc -show 2>/dev/null | grep -q mpich; then flavour=mpich; fi
    for package in "hdf5-$flavour" hdf5; do
        hdf5_include=$(pkg-config --variable=includedir "$package" 2>/dev/null) || continue
        hdf5_lib=$(pkg-config --variable=libdir "$package")
        is_parallel_hdf5 "$hdf5_include" "$hdf5_lib" && return 0
    done
    if words=$(h5pcc -show 2>/dev/null); then
        hdf5_include=$(grep -oE -- '-I *[^ ]+' <<<"$words" | head -n 1 | sed 's/^-I *//')
        hdf5_lib=$(grep -oE -- '-L *[^ ]+' <<<"$words" | head -n 1 | sed 's/^-L *//')
        is_parallel_hdf5 "$hdf5_include" "$hdf5_lib" && return 0
    fi
    hdf5_include=/usr/include/hdf5/$flavour
    hdf5_lib=/usr/lib/$(gcc -print-multiarch 2>/dev/null)/hdf5/$flavour
    is_parallel_hdf5 "$hdf5_include" "$hdf5_lib"
}

digest() {
    {
        cat "$root/jobscripts/setup_env.sh" "$constraints" "$root/setup.cfg"
        echo "$root $1 $("$1" -V) $(command -v mpicc) ${HDF5_DIR:-} $parallel_hdf5 ${LPNET_TORCH_INDEX:-}"
    } | sha256sum
}

python=$(find_python)
if [[ -n $python && -x $venv/bin/lpnet && -f $stamp ]] && [[ $(digest "$python") == "$(cat "$stamp")" ]]; then
    say "nothing to do; set-up took $SECONDS s"
    exit
fi

# What is missing

if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
    wanted=()
    [[ -n $python ]] && python_can "$python" || wanted+=(python3 python3-venv python3-dev)
    command -v mpicc >/dev/null && command -v mpirun >/dev/null && compiles || wanted+=(openmpi-bin libopenmpi-dev gcc libc6-dev)
    ((parallel_hdf5)) && ! find_hdf5 && [[ -z ${HDF5_DIR:-} ]] && wanted+=(libhdf5-openmpi-dev pkg-config)
    if ((${#wanted[@]})); then
        say "apt-get installs ${wanted[*]}"
        install=(apt-get install -y -q --no-install-recommends "${wanted[@]}")
        export DEBIAN_FRONTEND=noninteractive
        log=$(mktemp)
        # the package lists may be absent or out of date
        "${install[@]}" >"$log" 2>&1 9<&- || { apt-get update -q && "${install[@]}"; } >"$log" 2>&1 9<&- || {
            tail -n 20 "$log" >&2
            die "apt-get could not install ${wanted[*]}"
        }
        rm -f "$log"
        hash -r
        python=$(find_python)
    fi
fi

missing=()
if [[ -z $python ]]; then
    have=$(python3 -V 2>/dev/null || echo missing)
    missing+=("a Python >= 3.11 (python3 is $have): load a newer module, or name one in LPNET_PYTHON")
elif ! python_can "$python"; then
    missing+=("the modules venv and ensurepip, or Python.h, of $python: install python3-venv and python3-dev, or name another Python in LPNET_PYTHON")
fi
if ! command -v mpicc >/dev/null; then
    missing+=("mpicc: load an MPI module (module avail mpi), or install openmpi-bin and libopenmpi-dev")
elif ! compiles; then
    missing+=("a C compiler that $(command -v mpicc) can call: load a compiler module, or install gcc")
fi
if ! command -v mpirun >/dev/null && ! command -v srun >/dev/null; then
    missing+=("mpirun or srun: load an MPI module, or install openmpi-bin")
fi
if ((parallel_hdf5)) && ! find_hdf5; then
    where=${HDF5_DIR:+" in HDF5_DIR=$HDF5_DIR"}
    missing+=("a parallel HDF5$where: load its module (module avail hdf5), or set HDF5_DIR to a build with --enable-parallel, or install libhdf5-openmpi-dev, or set LPNET_HDF5=serial to do without")
fi
if ((${#missing[@]})); then
    die "this machine lacks" "${missing[@]/#/  - }" "then run this script again"
fi

# The environment

rm -f "$stamp"
# one made by another Python, or moved here from elsewhere, is made anew
if ! [[ $("$venv/bin/python" -V 2>/dev/null) == "$("$python" -V)" ]] || ! head -n 2 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/python"; then
    say "$("$python" -V) ($python) makes .venv"
    "$python" -m venv --clear "$venv"
fi
export PIP_DISABLE_PIP_VERSION_CHECK="${PIP_DISABLE_PIP_VERSION_CHECK:-1}" PIP_ROOT_USER_ACTION="${PIP_ROOT_USER_ACTION:-ignore}"
[[ -n ${PIP_CACHE_DIR:-} ]] || export PIP_NO_CACHE_DIR="${PIP_NO_CACHE_DIR:-1}" # nothing is written outside this repository
pip_install() { "$venv/bin/python" -m pip install -qq -c "$constraints" "$@" 9<&-; }

say "building tools, numpy, mpi4py ($(command -v mpicc))"
pip_install setuptools wheel packaging pkgconfig cython numpy mpi4py

# h5py: its wheel is kept, under the name of what it was built with. Without isolation, or it compiles an mpi4py first.
h5py_pin=$(grep -i '^h5py==' "$constraints")
if ((parallel_hdf5)); then
    recipe="$h5py_pin $("$python" -V) $(mpicc -show 2>/dev/null) $hdf5_include $hdf5_lib"
    wheels=$venv/h5py/$(sha256sum <<<"$recipe" | cut -c 1-12)
    built() { compgen -G "$wheels/*.whl" >/dev/null; }
    build_h5py() {
        exec env -u HDF5_DIR -u HDF5_PKGCONFIG_NAME H5PY_SETUP_REQUIRES=0 HDF5_MPI=ON CC=mpicc CFLAGS="-O1 -g0" \
            HDF5_INCLUDEDIR="$hdf5_include" HDF5_LIBDIR="$hdf5_lib" \
            "$venv/bin/python" -m pip wheel -w "$wheels" --no-binary=h5py --no-build-isolation --no-deps "$h5py_pin" >"$wheels.log" 2>&1 9<&-
    }
    if ! built; then
        say "h5py builds in the background ($hdf5_lib)"
        mkdir -p "$wheels"
        build_h5py &
        build=$!
        trap 'kill "$build" 2>/dev/null || true' EXIT
    fi
fi

say "torch and the other packages"
[[ -z ${LPNET_TORCH_INDEX:-} ]] || pip_install --no-deps --index-url "$LPNET_TORCH_INDEX" torch
mapfile -t packages < <("$venv/bin/python" - "$root/setup.cfg" <<'PY'
import configparser, sys
setup = configparser.ConfigParser()
setup.read(sys.argv[1])
names = setup["options"]["install_requires"].split() + [n for extra in setup["options.extras_require"].values() for n in extra.split()]
print(*(name for name in names if name != "h5py"), sep="\n")
PY
)
pip_install "${packages[@]}"

if ((parallel_hdf5)); then
    if [[ -n ${build:-} ]]; then
        say "waiting for h5py"
        wait "$build" || {
            tail -n 30 "$wheels.log" >&2
            die "h5py did not build against $hdf5_lib: the log is $wheels.log"
        }
        trap - EXIT
    fi
    if [[ $(cat "$venv/h5py/installed" 2>/dev/null) != "$recipe" ]]; then
        pip_install --no-deps --force-reinstall "$wheels"/*.whl
        echo "$recipe" >"$venv/h5py/installed"
    fi
    "$venv/bin/python" -c 'import h5py, sys; sys.exit(not h5py.get_config().mpi)' || die "h5py was built without MPI: see $wheels.log"
else
    again=()
    [[ -f $venv/h5py/installed ]] && again=(--force-reinstall) # there is one with MPI
    pip_install --no-deps --only-binary=h5py "${again[@]}" h5py
    rm -f "$venv/h5py/installed"
fi
"$venv/bin/python" -m pip install -qq --no-build-isolation --no-deps -e "$root" 9<&-

digest "$python" >"$stamp"
say "set-up took $SECONDS s"
