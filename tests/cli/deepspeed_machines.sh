#!/bin/sh
# deepspeed_machines.sh LAUNCHER ACCELERATE PROGRAM: trains with ZeRO on two machines, which are 127.0.0.1 and 127.0.0.2, as --deepspeed_multinode_launcher LAUNCHER starts them.
# pdsh, Slurm and the mpirun of Open MPI and of MPICH are the real ones; ssh, and the mpirun of MVAPICH, which nobody packs, are stand-ins that start their commands here.
launcher=$1 accelerate=$2 program=$3
folder=$(mktemp -d) && cd "$folder" || exit
trap 'rm -rf "$folder"' EXIT
need() { command -v "$1" > /dev/null || { echo "FAILED: there is no $1 (Debian: $2), which scripts/test.sh installs"; exit 1; }; }
stand_in() { cat > "$1" && chmod +x "$1"; }
stand_in_for_ssh() {
  stand_in ssh << 'END'
#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
shift
exec sh -c "$*"
END
}
export HOME="$folder" PATH="$folder:$PATH" OMP_NUM_THREADS=1
printf '127.0.0.1 slots=1\n127.0.0.2 slots=1\n' > hosts
# The self-test compares with a plain process, which clips nothing.
echo '{"train_micro_batch_size_per_gpu": 4, "gradient_clipping": 0.0, "zero_optimization": {"stage": 1}}' > ds.json
port=$((20000 + $$ % 9000))
train() { "$@" "$accelerate" launch --use_deepspeed --deepspeed_config_file ds.json --num_machines 2 --deepspeed_multinode_launcher "$launcher" --deepspeed_hostfile hosts --main_process_port $port $more "$program"; }
case $launcher in
  standard | nossh)
    [ $launcher = nossh ] || more="-q --num_processes 2 --main_process_ip 127.0.0.1"
    with=$more
    more="$with --machine_rank 1" && train &
    more="$with --machine_rank 0" && train && wait $! ;;
  pdsh)
    need pdsh pdsh
    stand_in_for_ssh
    train ;;
  openmpi)
    need mpirun openmpi-bin
    stand_in_for_ssh
    export OMPI_MCA_oob_tcp_if_include=lo OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
    train ;;
  mpich)
    need mpirun.mpich mpich
    stand_in_for_ssh
    train ;;
  mvapich)
    stand_in mpirun << 'END'
#!/bin/sh
[ "$1" = --version ] && { echo "HYDRA build details:"; exit; }
while :; do
  case $1 in
    -n | -np) all=$2; shift 2 ;;
    -ppn) each=$2; shift 2 ;;
    -hosts) hosts=$2; shift 2 ;;
    -genvall) shift ;;
    -*) echo "mpirun: unrecognized argument $1"; exit 255 ;;
    *) break ;;
  esac
done
[ "$all $each $hosts" = "2 1 127.0.0.1,127.0.0.2" ] || { echo "mpirun: $all processes, $each on each of $hosts"; exit 255; }
rank() { # NUMBER PROGRAM
  number=$1
  shift
  [ -n "$MV2_SUPPORT_DL" ] || { echo "mpirun: MV2_SUPPORT_DL is not set"; exit 255; }
  env MV2_COMM_WORLD_RANK=$number MV2_COMM_WORLD_SIZE=$all MV2_COMM_WORLD_LOCAL_RANK=0 MV2_COMM_WORLD_LOCAL_SIZE=1 "$@"
}
rank 1 "$@" &
rank 0 "$@" && wait $!
END
    train ;;
  slurm)
    # The names count, too.
    more="--deepspeed_inclusion_filter 127.0.0.2@127.0.0.1"
    train "$(dirname "$0")/with_slurm.sh" ;;
esac && echo "ended well"
