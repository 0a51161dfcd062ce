#!/bin/sh
# with_slurm.sh COMMAND [ARGUMENTS]: runs the command where srun works: Slurm's own daemons, for two machines that are 127.0.0.1 and 127.0.0.2, for as long as the command runs.
PATH=$PATH:/usr/sbin:/sbin
for program in srun slurmctld slurmd munged; do
  command -v $program > /dev/null || { echo "FAILED: there is no $program (Debian: slurmctld slurmd slurm-client munge), which scripts/test.sh installs"; exit 1; }
done
folder=$(mktemp -d) || exit
stop() {
  # Once no job is left nobody waits for a daemon; some of them would take their time to end by themselves.
  for _ in $(seq 50); do
    [ -n "$(timeout 5 squeue -h)" ] || break
    sleep 0.1
  done
  kill -KILL $(cat "$folder"/*.pid)
  rm -rf "$folder"
} 2> /dev/null
trap stop EXIT
trap 'exit 143' TERM INT
free_port() { # the first of three in a row
  port=$((20000 + $$ % 1000 * 10))
  while grep -qi "$(printf ':%04X\|:%04X\|:%04X' $port $((port + 1)) $((port + 2)))" /proc/net/tcp; do port=$((port + 3)); done
}
free_port
cat > "$folder/slurm.conf" << END
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthInfo=socket=$folder/munge.sock
SlurmctldPort=$port
StateSaveLocation=$folder
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
KillWait=1
SelectType=select/cons_tres
SchedulerType=sched/builtin
NodeName=127.0.0.[1-2] NodeHostname=$(hostname -s) NodeAddr=127.0.0.[1-2] Port=[$((port + 1))-$((port + 2))] CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
END
export SLURM_CONF="$folder/slurm.conf"
head -c 128 /dev/urandom > "$folder/key" && chmod 600 "$folder/key"
munged --force --key-file="$folder/key" --socket="$folder/munge.sock" --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" --seed-file="$folder/seed" 2> "$folder/munged.err" &&
  slurmctld -c && slurmd -N 127.0.0.1 && slurmd -N 127.0.0.2
for _ in $(seq 100); do
  [ "$(sinfo -h -t idle -o %D 2> /dev/null)" = 2 ] && break
  sleep 0.1
done
[ "$(sinfo -h -t idle -o %D)" = 2 ] || { cat "$folder"/*.err "$folder"/*.log >&2; exit 70; }
"$@"
