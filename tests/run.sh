#!/usr/bin/env bash
# Set-up, lint, the serial tests, the tests on four ranks: bash tests/run.sh [--full] [pytest arguments]
# --full adds the suites that need root or extra packages (SLURM, browser). The last line is the total.
#   LPNET_DATA, LPNET_ORACLES  folders of public data sets and oracles; tests that need them skip without
#   LPNET_SERIAL_TIMEOUT, LPNET_RANKS_TIMEOUT  seconds for the pass without mpirun (1800) and on four ranks (1800)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

full=0
if [[ ${1:-} == --full ]]; then
    full=1
    shift
fi
began=$SECONDS
bash jobscripts/setup_env.sh || exit 1
# shellcheck source=jobscripts/mpi_env.sh
. jobscripts/mpi_env.sh
export OMP_NUM_THREADS=1
export OMPI_MCA_mpi_yield_when_idle="${OMPI_MCA_mpi_yield_when_idle:-1}" # also where others use the cores
PATH=$PWD/.venv/bin:$PATH
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

failed=0 passed=0 skipped=0
broken=() # the steps with a failure

number_of() { # WORD LINE: the number before the word, or 0
    local number
    number=$(grep -oE "[0-9]+ $1" <<<"$2" | head -n 1)
    echo "${number:-0}" | cut -d ' ' -f 1
}

# Adds the closing line of a pytest run, and a failure where the exit status tells of one that the line does not.
count() { # NAME STATUS OUTPUT
    local line bad
    line=$(sed 's/\x1b\[[0-9;]*m//g' "$3" | grep -E '[0-9]+ (passed|failed|skipped|errors?|deselected)\b.* in [0-9.]+s' | tail -n 1)
    bad=$(($(number_of failed "$line") + $(number_of 'errors?' "$line")))
    if (($2 != 0 && bad == 0)); then
        bad=1
        echo "$1: exit status $2 without a failed test$( (($2 == 124 || $2 == 137)) && echo ': out of time')"
    fi
    ((bad)) && broken+=("$1")
    failed=$((failed + bad)) passed=$((passed + $(number_of passed "$line"))) skipped=$((skipped + $(number_of skipped "$line")))
}

lint() { # COMMAND...
    printf '\n%s\n' "$*"
    "$@" && return
    failed=$((failed + 1)) broken+=("$*")
}

tests() { # NAME COMMAND...
    local name=$1 status
    shift
    printf '\n%s: %s\n' "$name" "$*"
    "$@" </dev/null 2>&1 | tee "$scratch/out"
    status=${PIPESTATUS[0]}
    ((status == 5)) && status=0 # pytest: the arguments leave no test in this pass
    count "$name" "$status" "$scratch/out"
}

suite() { # NAME SCRIPT: exit status 77 is a skip, its last line the reason
    local status
    if [[ ! -f $2 ]]; then
        printf '\n%s: skipped, there is no %s\n' "$1" "$2"
        return
    fi
    printf '\n%s: bash %s\n' "$1" "$2"
    bash "$2" </dev/null 2>&1 | tee "$scratch/out"
    status=${PIPESTATUS[0]}
    if ((status == 77)); then
        echo "$1: skipped, $(tail -n 1 "$scratch/out")"
        skipped=$((skipped + 1))
    else
        count "$1" "$status" "$scratch/out"
    fi
}

lint ruff check .
lint mypy
lint lint-imports --no-logo
# a failing rank aborts the others, a deadlock ends by faulthandler_timeout, all else by timeout
limit=(timeout -k 10)
[[ -t 0 ]] && limit+=(--foreground) # so that Ctrl-C reaches the tests
color=no
[[ -t 1 ]] && color=yes
tests serial "${limit[@]}" "${LPNET_SERIAL_TIMEOUT:-1800}" python -m pytest --color=$color -m "not ranks" "$@"
tests ranks "${limit[@]}" "${LPNET_RANKS_TIMEOUT:-1800}" \
    mpirun -n 4 python -m pytest --color=$color -m ranks -p no:cacheprovider -o faulthandler_timeout=120 "$@"
if ((full)); then
    suite slurm tests/slurm/run.sh
    suite browser tests/browser/run.sh
fi

((failed)) && printf '\nfailed:' && printf ' [%s]' "${broken[@]}" && echo
total="$passed passed"
((failed)) && total="$failed failed, $total"
((skipped)) && total="$total, $skipped skipped"
printf '\n%s in %ss\n' "$total" $((SECONDS - began))
((failed == 0))
