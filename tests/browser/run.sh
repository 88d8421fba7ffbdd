#!/usr/bin/env bash
# The report page in headless Chromium, from a real run to a screenshot: bash tests/browser/run.sh [pytest arguments]
#
# Needs chromium; as root on Debian or Ubuntu it is installed if it is missing, elsewhere this is skipped (exit status 77,
# the last line is the reason). Ends with pytest's line. LPNET_BROWSER names another browser that takes its options.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1

skip() {
    printf '%s\n' "$*"
    exit 77
}

python=.venv/bin/python
[[ -x $python ]] || skip "there is no .venv: run bash jobscripts/setup_env.sh first"

browser=${LPNET_BROWSER:-$(command -v chromium || command -v chromium-browser || true)}
if [[ -z $browser ]]; then
    [[ $(id -u) == 0 ]] || skip "there is no chromium, and installing it needs root"
    [[ -f /etc/debian_version ]] && command -v apt-get >/dev/null || skip "there is no chromium, and this is no Debian to install it on"
    log=$(mktemp)
    export DEBIAN_FRONTEND=noninteractive
    install=(apt-get install -y -q --no-install-recommends chromium)
    "${install[@]}" >"$log" 2>&1 || { apt-get update -q && "${install[@]}"; } >"$log" 2>&1 || {
        tail -n 5 "$log"
        rm -f "$log"
        skip "apt-get could not install chromium"
    }
    rm -f "$log"
    hash -r
    browser=$(command -v chromium) || skip "the package chromium brought no program of that name"
fi

export LPNET_BROWSER=$browser OMP_NUM_THREADS=1
"$python" -m pytest tests/browser/cases.py -q -p no:cacheprovider "$@"
