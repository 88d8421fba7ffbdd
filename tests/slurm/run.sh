#!/usr/bin/env bash
# The job scripts in a real SLURM of one node, made for this and ended after: bash tests/slurm/run.sh [pytest arguments]
#
# Needs root on Debian or Ubuntu, where it installs slurm-wlm and munge if they are missing; elsewhere it is skipped (exit
# status 77, the last line is the reason). The daemons are private: own ports, own keys, own folder; a SLURM of the
# machine is not touched. Ends with pytest's line. LPNET_KEEP_SLURM=1 keeps the folder with logs and job output.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.." || exit 1
root=$PWD

skip() {
    printf '%s\n' "$*"
    exit 77
}

[[ $(id -u) == 0 ]] || skip "a SLURM of its own needs root"
[[ -x .venv/bin/lpnet ]] || skip "there is no .venv: run bash jobscripts/setup_env.sh first"

missing=()
command -v slurmctld >/dev/null && command -v slurmd >/dev/null && command -v sbatch >/dev/null || missing+=(slurm-wlm)
command -v munged >/dev/null || missing+=(munge)
if ((${#missing[@]})); then
    if [[ ! -f /etc/debian_version ]] || ! command -v apt-get >/dev/null; then
        skip "there is no SLURM, and this is no Debian to install it on"
    fi
    install=(apt-get install -y -q --no-install-recommends "${missing[@]}")
    export DEBIAN_FRONTEND=noninteractive
    policy=/usr/sbin/policy-rc.d # the packages must not start daemons
    if [[ -e $policy ]]; then
        policy=''
    else
        printf '#!/bin/sh\nexit 101\n' >$policy
        chmod +x $policy
    fi
    log=$(mktemp)
    "${install[@]}" >"$log" 2>&1 || { apt-get update -q && "${install[@]}"; } >"$log" 2>&1 || failed=1
    [[ -z $policy ]] || rm -f "$policy"
    if [[ -n ${failed:-} ]]; then
        tail -n 5 "$log"
        rm -f "$log"
        skip "apt-get could not install ${missing[*]}"
    fi
    rm -f "$log"
    hash -r
fi

scratch=$(mktemp -d)
chmod 755 "$scratch"
mkdir "$scratch"/{state,spool,log,jobs}

daemons=()

clean_up() {
    local round
    scancel --quiet --full --signal=KILL --user=root 2>/dev/null
    scancel --quiet --user=root 2>/dev/null
    for ((round = 0; round < 100; round++)); do
        [[ -z $(squeue -h 2>/dev/null) ]] && break
        sleep 0.1
    done
    for ((round = ${#daemons[@]} - 1; round >= 0; round--)); do
        kill "${daemons[round]}" 2>/dev/null
        (sleep 10 && kill -KILL "${daemons[round]}") 2>/dev/null &
        wait "${daemons[round]}" 2>/dev/null
        kill $! 2>/dev/null
    done
    if [[ -n ${LPNET_KEEP_SLURM:-} ]]; then echo "kept: $scratch"; else rm -rf "$scratch"; fi
}
trap clean_up EXIT
trap 'exit 130' INT TERM

read -r -a ports < <(.venv/bin/python -c '
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))')

host=$(hostname -s)
# CPUs: more than there are, for jobs that mostly sleep. cred_expire: a requeued job waits for it, two minutes by default
cat >"$scratch/slurm.conf" <<CONF
ClusterName=lpnet
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort=${ports[0]}
SlurmdPort=${ports[1]}
AuthType=auth/munge
AuthInfo=socket=$scratch/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
StateSaveLocation=$scratch/state
SlurmdSpoolDir=$scratch/spool
SlurmctldPidFile=$scratch/slurmctld.pid
SlurmdPidFile=$scratch/slurmd.pid
SlurmctldLogFile=$scratch/log/slurmctld.log
SlurmdLogFile=$scratch/log/slurmd.log
SlurmdParameters=config_overrides
SchedulerParameters=sched_min_interval=0,sched_interval=2
ReturnToService=2
KillWait=10
NodeName=$host NodeAddr=127.0.0.1 CPUs=64 State=UNKNOWN
PartitionName=main Nodes=$host Default=YES MaxTime=INFINITE State=UP
CONF
export SLURM_CONF=$scratch/slurm.conf

(umask 077 && head -c 1024 /dev/urandom >"$scratch/munge.key")
daemon() { # NAME COMMAND...
    "${@:2}" >"$scratch/log/$1.out" 2>&1 &
    daemons+=($!)
}
daemon munged munged --force --foreground --key-file="$scratch/munge.key" --socket="$scratch/munge.socket" \
    --pid-file="$scratch/munged.pid" --log-file="$scratch/log/munged.log" --seed-file="$scratch/munged.seed"
for ((round = 0; round < 100; round++)); do
    [[ -S $scratch/munge.socket ]] && break
    sleep 0.1
done
daemon slurmctld slurmctld -D -c
daemon slurmd slurmd -D -c
for ((round = 0; round < 200; round++)); do
    [[ $(sinfo -h -o %t 2>/dev/null) == idle ]] && break
    sleep 0.1
done
if ((round == 200)); then
    tail -n 10 "$scratch"/log/*
    echo "the node did not become idle within 20 s"
    exit 1
fi
echo "$(sinfo --version) on $host, ready after $SECONDS s"

# What ranks need as root and on few cores; none of it is a setting of a real site.
cat >"$scratch/site.env" <<SITE
# shellcheck shell=bash disable=SC2034
. "$root/jobscripts/mpi_env.sh"
export OMP_NUM_THREADS=1 OMPI_MCA_mpi_yield_when_idle=1
LPNET_LAUNCHER=\${LPNET_LAUNCHER:-mpirun}
mpirun_flags=(--oversubscribe --bind-to none)
srun_flags=(--mpi=pmix --kill-on-bad-exit=1 --cpu-bind=none)
SITE

export LPNET_ROOT=$root LPNET_SITE=$scratch/site.env LPNET_SLURM_JOBS=$scratch/jobs
timeout -k 10 900 .venv/bin/python -m pytest -p no:cacheprovider --color=no -o faulthandler_timeout=600 tests/slurm/cases.py "$@"
