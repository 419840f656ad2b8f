#!/bin/sh
# Installs what tests/slurm_cluster.py starts, where that can be done; elsewhere those tests are skipped.
set -eu
missing=
# One by one: of several names dash looks at the first alone.
for program in munged slurmctld slurmd srun sbatch scontrol; do
    command -v "$program" >/dev/null || missing="$missing $program"
done
if [ -z "$missing" ]; then exit 0; fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no SLURM, as$missing cannot be installed: that needs root and apt-get" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
# The packages are not to start services of their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
    trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends slurmctld slurmd slurm-client munge >/dev/null
