# Real clients in both directions: Hugging Face Accelerate's own scripts started by our launcher, our self-test by others' launchers.
# Python is $ACCELERATE_TEST_PYTHON at run time; without it the tests count as skipped and say so.
set(python "python=$ACCELERATE_TEST_PYTHON && { test -n \"$python\" || { echo 'skipped: ACCELERATE_TEST_PYTHON is not set (scripts/test.sh sets it)'; exit; }; } && ")
foreach(script test_ops test_sync test_script)
  add_test(NAME python_client.${script} COMMAND sh -c "${python} PYTHON=$python $<TARGET_FILE:accelerate_cli> launch --cpu --num_processes 2 ${CMAKE_CURRENT_LIST_DIR}/peer_script.py ${script} && echo ended well")
  set_tests_properties(python_client.${script} PROPERTIES LABELS cli TIMEOUT 300 PASS_REGULAR_EXPRESSION "ended well" SKIP_REGULAR_EXPRESSION "skipped: ")
endforeach()

# By mpirun through our launcher: Open MPI refuses to work for root unless it is told that this is meant.
add_test(NAME self_test.launch_mpirun COMMAND sh -c "command -v mpirun > /dev/null || { echo 'FAILED: there is no mpirun (Debian: openmpi-bin), which scripts/test.sh installs'; exit 1; }; \
echo localhost slots=2 > mpi_hosts && OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
$<TARGET_FILE:accelerate_cli> launch --cpu --num_processes 2 --mpirun_hostfile mpi_hosts $<TARGET_FILE:accelerate_self_test> && echo All is well")

# The self-test prints FAILED for what is wrong, and ends with another code than 0.
add_test(NAME self_test.ours COMMAND sh -c "$<TARGET_FILE:accelerate_cli> test --cpu --num_processes 2")
add_test(NAME self_test.torchrun COMMAND sh -c "${python} $python -m torch.distributed.run --nproc_per_node 2 --no_python $<TARGET_FILE:accelerate_self_test> && echo All is well")
add_test(NAME self_test.python_launch COMMAND sh -c "${python} $python -m accelerate.commands.launch --cpu --num_processes 1 --no_python $<TARGET_FILE:accelerate_self_test> && echo All is well with one")
set_tests_properties(self_test.python_launch PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "1 processes.*training: with gradient accumulation.*All is well with one"
                     FAIL_REGULAR_EXPRESSION "FAILED" SKIP_REGULAR_EXPRESSION "skipped: ")
add_test(NAME self_test.mpirun COMMAND sh -c "command -v mpirun > /dev/null || { echo 'FAILED: there is no mpirun (Debian: openmpi-bin), which scripts/test.sh installs'; exit 1; }; \
MASTER_ADDR=127.0.0.1 MASTER_PORT=29591 ACCELERATE_USE_CPU=true mpirun --allow-run-as-root --oversubscribe -n 2 $<TARGET_FILE:accelerate_self_test> && echo All is well")
set_tests_properties(self_test.launch_mpirun self_test.ours self_test.torchrun self_test.mpirun PROPERTIES LABELS cli TIMEOUT 240
                     PASS_REGULAR_EXPRESSION "2 processes.*training: with gradient accumulation.*All is well" FAIL_REGULAR_EXPRESSION "FAILED" SKIP_REGULAR_EXPRESSION "skipped: ")

# Our examples by others: the small loop, and nlp_example on a few pairs where there are weights (by mpirun those of the manual, else small ones).
if(ACCELERATE_EXAMPLES)
  set(mpirun "mpirun --allow-run-as-root --oversubscribe -x ACCELERATE_USE_CPU -x OMP_NUM_THREADS -x MASTER_ADDR -x MASTER_PORT -n 2")
  set(data "data=$ACCELERATE_TEST_DATA && { test -n \"$data\" || { echo 'skipped: ACCELERATE_TEST_DATA is not set (scripts/test.sh sets it)'; exit; }; } && ")
  # started_by(name needs prefix bert): `prefix` goes before the program; `needs` skips the test where something is missing; `bert` makes $bert.
  function(started_by launcher needs prefix bert)
    set(environment "export ACCELERATE_USE_CPU=true OMP_NUM_THREADS=1 MASTER_ADDR=127.0.0.1 MASTER_PORT=$((20000 + $$ % 9000)) && ")
    add_test(NAME example.training_loop.${launcher} COMMAND sh -c "${needs}${environment}${prefix} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/training_loop && echo ended well")
    add_test(NAME example.nlp_example.${launcher} COMMAND sh -c "${data}${needs}${environment}scratch=$(mktemp -d) && trap 'rm -rf \"$scratch\"' EXIT && ${bert} && ${prefix} ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/nlp_example --model $bert --pairs $data/pairs.tsv --train_size 32 --eval_size 18 --output_dir $scratch && echo ended well")
    set_tests_properties(example.training_loop.${launcher} PROPERTIES PASS_REGULAR_EXPRESSION "accuracy (1|0\\.9[0-9]*) on 512 samples.*ended well")
    set_tests_properties(example.nlp_example.${launcher} PROPERTIES PASS_REGULAR_EXPRESSION "f1 [01].* on 18 held-out pairs.*ended well")
    set_tests_properties(example.training_loop.${launcher} example.nlp_example.${launcher} PROPERTIES LABELS "cli;examples" TIMEOUT 240 SKIP_REGULAR_EXPRESSION "skipped: ")
  endfunction()
  set(small "bert=$scratch/bert && mkdir $bert && ${Python3_EXECUTABLE} ${TEST_DIR}/witness.py --make_small_bert \"$data/minilm\" $bert")
  started_by(torchrun "${python}" "$python -m torch.distributed.run --nproc_per_node 2 --master_port $MASTER_PORT --no_python" "${small}")
  # Python's launcher starts several processes only for several GPUs; our variable keeps the program on the CPU.
  started_by(python_launch "${python}" "$python -m accelerate.commands.launch --multi_gpu --num_machines 1 --num_processes 2 --main_process_port $MASTER_PORT --no_python" "${small}")
  started_by(mpirun "command -v mpirun > /dev/null || { echo 'FAILED: there is no mpirun (Debian: openmpi-bin), which scripts/test.sh installs'; exit 1; }; " "${mpirun}" "bert=$data/minilm")
endif()

# Two machines, which are two launchers here: our self-test, and a Python program that meets again after a rank was killed.
set(two_machines "a='$<TARGET_FILE:accelerate_cli> launch -q --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1'")
add_test(NAME self_test.two_machines COMMAND sh -c "${two_machines}; $a --cpu --main_process_port 29593 --machine_rank 1 $<TARGET_FILE:accelerate_self_test> & \
$a --cpu --main_process_port 29593 --machine_rank 0 $<TARGET_FILE:accelerate_self_test> && wait $! && echo All is well")
set_tests_properties(self_test.two_machines PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "2 processes.*training: with gradient accumulation.*All is well" FAIL_REGULAR_EXPRESSION "FAILED")
add_test(NAME python_client.restart_on_two_machines COMMAND sh -c "${python} export PYTHON=$python; ${two_machines}; b=\"$a --main_process_port 29594 --max_restarts 1\"; \
$b --machine_rank 1 ${CMAKE_CURRENT_LIST_DIR}/restart_client.py & $b --machine_rank 0 ${CMAKE_CURRENT_LIST_DIR}/restart_client.py && wait $! && echo ended well")
set_tests_properties(python_client.restart_on_two_machines PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "sum 3.0 after restart 1.*ended well" SKIP_REGULAR_EXPRESSION "skipped: ")

# By Slurm's own daemons, for two machines on this one: programs that srun starts, launchers that it starts on each machine, and what becomes of them. One after the
# other: each has daemons of its own, whose first jobs have the same number, from which the port to meet at follows.
set(slurm ${CMAKE_CURRENT_LIST_DIR}/with_slurm.sh)
function(slurm_test name outcome command)
  add_test(NAME slurm.${name} COMMAND sh -c "${slurm} sh -c '${command}' && echo ended well")
  set_tests_properties(slurm.${name} PROPERTIES LABELS cli TIMEOUT 600 RESOURCE_LOCK slurm PASS_REGULAR_EXPRESSION "${outcome}.*ended well" FAIL_REGULAR_EXPRESSION "FAILED")
endfunction()
slurm_test(program "3 processes.*training: with gradient accumulation" "srun -N 2 -n 3 $<TARGET_FILE:accelerate_self_test>")
slurm_test(program_by_pmi2 "2 processes.*training: with gradient accumulation" "srun --mpi=pmi2 -N 2 -n 2 $<TARGET_FILE:accelerate_self_test>")
slurm_test(launchers "4 processes.*training: with gradient accumulation" "srun -N 2 -n 2 $<TARGET_FILE:accelerate_cli> launch -q --cpu --num_processes 4 $<TARGET_FILE:accelerate_self_test>")
slurm_test(launchers_of_their_own "of its own: 0 of 1.*of its own: 0 of 1" "srun -N 1 -n 2 $<TARGET_FILE:accelerate_cli> launch -q --num_machines 1 sh -c \"echo of its own: \\$RANK of \\$WORLD_SIZE\"")
slurm_test(several_launchers_on_a_machine "srun has started 2 launchers: each starts one process" "srun -N 1 -n 2 $<TARGET_FILE:accelerate_cli> launch true 2>&1 || echo exit code $?")
slurm_test(killed_rank "exit code 137.*nobody left" "srun -N 2 -n 2 $<TARGET_FILE:accelerate_cli> launch -q sh -c \"[ \\$RANK = 0 ] || kill -9 \\$\\$; exec sleep 98765\" || echo exit code $?; sleep 1; pgrep -a -x sleep | grep 98765 || echo nobody left")

# With ZeRO on two machines, by each launcher that DeepSpeed has, without Python.
foreach(launcher standard nossh pdsh openmpi mpich mvapich slurm)
  add_test(NAME deepspeed_machines.${launcher} COMMAND ${CMAKE_CURRENT_LIST_DIR}/deepspeed_machines.sh ${launcher} $<TARGET_FILE:accelerate_cli> $<TARGET_FILE:accelerate_self_test>)
  set_tests_properties(deepspeed_machines.${launcher} PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "2 processes.*training: with gradient accumulation.*ended well" FAIL_REGULAR_EXPRESSION "FAILED")
endforeach()
set_tests_properties(deepspeed_machines.slurm PROPERTIES RESOURCE_LOCK slurm)
