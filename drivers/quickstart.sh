#!/usr/bin/env bash
# From nothing to a trained network and its pictures: bash drivers/quickstart.sh
# Sets up .venv, then trains the Peaks classification with MGRIT across two ranks, in about a minute.
#   LPNET_QUICKSTART_STEPS  optimisation steps, if not those of the configuration
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash jobscripts/setup_env.sh
# shellcheck source=jobscripts/mpi_env.sh
. jobscripts/mpi_env.sh

out=runs/quickstart-$(date +%Y%m%d-%H%M%S)
while [[ -e $out ]]; do out=$out-again; done
steps=()
[[ -z ${LPNET_QUICKSTART_STEPS:-} ]] || steps=(--run.steps "$LPNET_QUICKSTART_STEPS")

command=(mpirun -n 2 .venv/bin/lpnet train drivers/configs/peaks_mgrit.yaml --run.out "$out" "${steps[@]}")
printf '\n%s\n\n' "${command[*]}"
began=$SECONDS
"${command[@]}"

printf '\nTrained in %s s on 2 ranks. The run is in %s:\n' $((SECONDS - began)) "$out"
describe() { # FILE TEXT; FILE may be a pattern
    if compgen -G "$out/$1" >/dev/null; then printf '  %-22s %s\n' "$1" "$2"; fi
}
describe config.yaml "the configuration with every default filled in; lpnet train reads it again"
describe env.json "versions, machine, ranks and threads"
describe metrics.jsonl "one line per step: loss, accuracy, gradient norm, MGRIT residuals, seconds"
describe log.txt "what the ranks said"
describe checkpoints "parameters and optimiser state, readable on any number of ranks (lpnet show FILE)"
describe trace.json "what every rank did when, for a trace viewer"
for picture in "$out"/*.png; do
    [[ -e $picture ]] || continue
    case $(basename "$picture") in
        *curve* | *loss* | *metric*) text="loss and accuracy over the steps" ;;
        *residual*) text="how far each multigrid iteration brings the residual down" ;;
        *decision* | *region* | *class*) text="what the network decides in the plane, beside the true classes" ;;
        *) text="" ;;
    esac
    describe "$(basename "$picture")" "$text"
done
printf 'Next: mpirun -n 4 .venv/bin/lpnet train drivers/configs/peaks_mgrit.yaml --run.out runs/mine, or bash tests/run.sh\n'
