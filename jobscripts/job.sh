# shellcheck shell=bash
# Sourced by the job scripts: site settings, launcher, signals, requeue.
#
#   lpnet_train ARGUMENTS...          lpnet train --resume auto on all tasks of the job; requeued on exit code 75 only
#   lpnet_study STUDY.yaml OUT ...    lpnet study with measured times; its cells are launched; requeued likewise
#   lpnet_run RANKS ARGUMENTS...      lpnet on RANKS ranks; signals to the script reach them; returns the exit code
#
#   LPNET_ROOT              this repository          (default: the folder sbatch was called in)
#   LPNET_SITE              site settings            (default: jobscripts/site.env)
#   LPNET_COMMAND           what is run              (default: .venv/bin/lpnet of the repository)
#   LPNET_REQUEUE           no: never requeue
#   LPNET_REQUEUE_ON_TERM   yes: requeue after SIGTERM too (preemption; else SIGTERM is taken for a cancellation)

lpnet_say() { printf 'job %s %(%F %T)T: %s\n' "${SLURM_JOB_ID:-?}" -1 "$*"; }

LPNET_ROOT=${LPNET_ROOT:-${SLURM_SUBMIT_DIR:-$PWD}}
# shellcheck source=jobscripts/site.env
. "${LPNET_SITE:-$LPNET_ROOT/jobscripts/site.env}"

lpnet_command=${LPNET_COMMAND:-$LPNET_ROOT/.venv/bin/lpnet}
if [[ ! -x $lpnet_command ]]; then
    lpnet_say "there is no $lpnet_command: run bash jobscripts/setup_env.sh first, and call sbatch in the repository or set LPNET_ROOT"
    exit 2
fi

# lpnet stops in time by itself where it knows the end of the job. Older SLURMs do not say it, and a job that was
# submitted from within another one may have inherited the end of that.
lpnet_end=$(squeue -h -j "${SLURM_JOB_ID:-0}" -o %e 2>/dev/null)
if [[ $lpnet_end == 2*T* ]] && lpnet_end=$(date -d "$lpnet_end" +%s 2>/dev/null); then
    export SLURM_JOB_END_TIME=$lpnet_end
fi

lpnet_child='' lpnet_signal='' lpnet_again=''

# A trap runs when `wait` returns, so what is run runs in the background. It stops on SIGUSR1; SIGTERM would make mpirun
# end the ranks within a second.
lpnet_forward() { # SIGNAL
    lpnet_signal=$1
    lpnet_say "received SIG$1, asks lpnet to stop"
    [[ -n $lpnet_child ]] || return
    kill -USR1 "$lpnet_child" 2>/dev/null
    if [[ -z $lpnet_again ]]; then # and again, for ranks that have only just started do not listen yet
        (while sleep 5 && kill -USR1 "$lpnet_child"; do :; done) >/dev/null 2>&1 &
        lpnet_again=$!
    fi
}
trap 'lpnet_forward USR1' USR1
trap 'lpnet_forward TERM' TERM

lpnet_start() { # COMMAND...
    local status
    if [[ -n $lpnet_signal ]]; then
        lpnet_say "was asked to stop before it began"
        return 75
    fi
    lpnet_say "$*"
    (
        trap '' USR1 # until lpnet listens: it would end a launcher, or a rank, that has just started
        exec "$@"
    ) &
    lpnet_child=$!
    while :; do
        wait "$lpnet_child"
        kill -0 "$lpnet_child" 2>/dev/null || break # a trap ends `wait` too
    done
    wait "$lpnet_child" # bash remembers
    status=$?
    lpnet_child=''
    [[ -z $lpnet_again ]] || kill "$lpnet_again" 2>/dev/null
    lpnet_again=''
    lpnet_say "exit code $status"
    if ((status == 128 + 10)); then # SIGUSR1: it came before a rank listened, or the launcher
        lpnet_say "ended by SIGUSR1 before it listened: taken for a stop"
        status=75
    fi
    return "$status"
}

lpnet_run() {
    local ranks=$1
    shift
    case $LPNET_LAUNCHER in
        mpirun) lpnet_start mpirun -n "$ranks" "${mpirun_flags[@]}" "$lpnet_command" "$@" ;;
        srun) lpnet_start srun --ntasks="$ranks" "${srun_flags[@]}" "$lpnet_command" "$@" ;;
        *)
            lpnet_say "LPNET_LAUNCHER is $LPNET_LAUNCHER; it must be mpirun or srun"
            return 2
            ;;
    esac
}

lpnet_out() { # ARGUMENTS...: the value of --run.out
    local word next=0
    for word in "$@"; do
        case $word in
            --run.out=*) printf '%s' "${word#*=}" && return ;;
            --run.out) next=1 ;;
            *) ((next)) && printf '%s' "$word" && return ;;
        esac
    done
}

lpnet_train() {
    local out status before
    out=$(lpnet_out "$@")
    if [[ -z $out ]]; then # the same folder after a requeue
        out=runs/${SLURM_JOB_NAME:-lpnet}-${SLURM_JOB_ID:-0}
        set -- "$@" --run.out "$out"
    fi
    before=$(lpnet_progress "$out")
    lpnet_run "${SLURM_NTASKS:-1}" train "$@" --resume auto
    status=$?
    ((status == 75)) && lpnet_requeue "$out" "$before"
    return "$status"
}

lpnet_study() {
    local out=$2 launch status before
    case $LPNET_LAUNCHER in
        srun) launch="srun --exact --ntasks={ranks} ${srun_flags[*]}" ;;
        *) launch="mpirun -n {ranks} ${mpirun_flags[*]}" ;;
    esac
    before=$(lpnet_progress "$out")
    lpnet_start "$lpnet_command" study "$1" --out "$out" --run measured --launch "$launch" "${@:3}"
    status=$?
    ((status == 75)) && lpnet_requeue "$out" "$before"
    return "$status"
}

lpnet_progress() { # FOLDER: something that changes with every checkpoint, and every cell of a study
    cat "$1/checkpoints/latest" 2>/dev/null
    find "$1/cells" -name '*.json' 2>/dev/null | wc -l
}

lpnet_requeue() { # FOLDER PROGRESS-BEFORE
    local out=$1 idle=$1/idle-starts how=requeue
    if [[ $(lpnet_progress "$out") != "$2" ]]; then
        rm -f "$idle"
    else
        mkdir -p "$out" # a rank makes it, if it comes that far
        echo "${SLURM_JOB_ID:-}" >>"$idle"
        if (($(wc -l <"$idle") >= 3)); then
            lpnet_say "three starts without progress: not requeued; give the job more time, or lower run.stop_margin_s"
            rm -f "$idle"
            return
        fi
    fi
    if [[ ${LPNET_REQUEUE:-} == no ]]; then
        lpnet_say "not requeued, as LPNET_REQUEUE says; submit it again to go on"
        return
    fi
    if [[ $lpnet_signal == TERM && ${LPNET_REQUEUE_ON_TERM:-} != yes ]]; then
        lpnet_say "cancelled: not requeued; submit it again to go on"
        return
    fi
    grep -qs hold "$out/STOPPED" && how=requeuehold
    lpnet_say "scontrol $how $SLURM_JOB_ID$([[ $how == requeuehold ]] && echo "; scontrol release $SLURM_JOB_ID goes on")"
    trap - USR1 TERM # what comes now is meant for this script
    scontrol "$how" "$SLURM_JOB_ID"
}
