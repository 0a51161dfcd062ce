# Real clients in both directions: Hugging Face Accelerate's own scripts started by our launcher, our self-test by others' launchers.
# Python is $ACCELERATE_TEST_PYTHON at run time; without it the tests count as skipped and say so.
set(python "python=$ACCELERATE_TEST_PYTHON && { test -n \"$python\" || { echo 'skipped: ACCELERATE_TEST_PYTHON is not set (scripts/test.sh sets it)'; exit; }; } && ")
foreach(script test_ops test_sync test_script)
  add_test(NAME python_client.${script} COMMAND sh -c "${python} scripts=$($python -c 'import accelerate.test_utils.scripts as s; print(s.__path__[0])') && PYTHON=$python $<TARGET_FILE:accelerate_cli> launch --cpu --num_processes 2 $scripts/${script}.py && echo ended well")
  set_tests_properties(python_client.${script} PROPERTIES LABELS cli TIMEOUT 300 PASS_REGULAR_EXPRESSION "ended well" SKIP_REGULAR_EXPRESSION "skipped: ")
endforeach()

# By mpirun through our launcher: Open MPI refuses to work for root unless it is told that this is meant.
add_test(NAME self_test.launch_mpirun COMMAND sh -c "command -v mpirun > /dev/null || { echo 'skipped: there is no mpirun (Debian: openmpi-bin)'; exit; }; \
echo localhost slots=2 > mpi_hosts && OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 \
$<TARGET_FILE:accelerate_cli> launch --cpu --num_processes 2 --mpirun_hostfile mpi_hosts $<TARGET_FILE:accelerate_self_test> && echo All is well")

# The self-test prints FAILED for what is wrong, and ends with another code than 0.
add_test(NAME self_test.ours COMMAND sh -c "$<TARGET_FILE:accelerate_cli> test --cpu --num_processes 2")
add_test(NAME self_test.torchrun COMMAND sh -c "${python} $python -m torch.distributed.run --nproc_per_node 2 --no_python $<TARGET_FILE:accelerate_self_test> && echo All is well")
add_test(NAME self_test.python_launch COMMAND sh -c "${python} $python -m accelerate.commands.launch --cpu --num_processes 1 --no_python $<TARGET_FILE:accelerate_self_test> && echo All is well with one")
set_tests_properties(self_test.python_launch PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "1 processes.*training: with gradient accumulation.*All is well with one"
                     FAIL_REGULAR_EXPRESSION "FAILED" SKIP_REGULAR_EXPRESSION "skipped: ")
add_test(NAME self_test.mpirun COMMAND sh -c "command -v mpirun > /dev/null || { echo 'skipped: there is no mpirun (Debian: openmpi-bin)'; exit; }; \
MASTER_ADDR=127.0.0.1 MASTER_PORT=29591 ACCELERATE_USE_CPU=true mpirun --allow-run-as-root --oversubscribe -n 2 $<TARGET_FILE:accelerate_self_test> && echo All is well")
set_tests_properties(self_test.launch_mpirun self_test.ours self_test.torchrun self_test.mpirun PROPERTIES LABELS cli TIMEOUT 240
                     PASS_REGULAR_EXPRESSION "2 processes.*training: with gradient accumulation.*All is well" FAIL_REGULAR_EXPRESSION "FAILED" SKIP_REGULAR_EXPRESSION "skipped: ")

# Two machines, which are two launchers here: our self-test, and a Python program that meets again after a rank was killed.
set(two_machines "a='$<TARGET_FILE:accelerate_cli> launch -q --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1'")
add_test(NAME self_test.two_machines COMMAND sh -c "${two_machines}; $a --cpu --main_process_port 29593 --machine_rank 1 $<TARGET_FILE:accelerate_self_test> & \
$a --cpu --main_process_port 29593 --machine_rank 0 $<TARGET_FILE:accelerate_self_test> && wait $! && echo All is well")
set_tests_properties(self_test.two_machines PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "2 processes.*training: with gradient accumulation.*All is well" FAIL_REGULAR_EXPRESSION "FAILED")
add_test(NAME python_client.restart_on_two_machines COMMAND sh -c "${python} export PYTHON=$python; ${two_machines}; b=\"$a --main_process_port 29594 --max_restarts 1\"; \
$b --machine_rank 1 ${CMAKE_CURRENT_LIST_DIR}/restart_client.py & $b --machine_rank 0 ${CMAKE_CURRENT_LIST_DIR}/restart_client.py && wait $! && echo ended well")
set_tests_properties(python_client.restart_on_two_machines PROPERTIES LABELS cli TIMEOUT 240 PASS_REGULAR_EXPRESSION "sum 3.0 after restart 1.*ended well" SKIP_REGULAR_EXPRESSION "skipped: ")
