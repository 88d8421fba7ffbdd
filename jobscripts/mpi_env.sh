# shellcheck shell=bash
# Sourced by the quickstart and the tests, never by the library: what mpirun needs as root and on few cores.

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

if [[ $(id -u) == 0 ]]; then
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
fi

# More ranks than cores: the tests start up to 16.
if (($(nproc) < 16)); then
    export OMPI_MCA_rmaps_base_oversubscribe="${OMPI_MCA_rmaps_base_oversubscribe:-1}"                                # Open MPI 4
    export PRTE_MCA_rmaps_default_mapping_policy="${PRTE_MCA_rmaps_default_mapping_policy:-:oversubscribe}"    # Open MPI 5
fi
