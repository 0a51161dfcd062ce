# Every example runs with two processes on a small input, and its printed outcome is looked at.
# Those that need files get them from $ACCELERATE_TEST_DATA when they run; without it they count as skipped and say so.
if(ACCELERATE_EXAMPLES)
  # example_test(name OUTCOME regex [DATA] [ARGS text]): in ARGS, $data is the folder of the data and $scratch an empty one.
  function(example_test name)
    cmake_parse_arguments(ARG "DATA" "OUTCOME;ARGS" "" ${ARGN})
    set(script "scratch=$(mktemp -d) && trap 'rm -rf \"$scratch\"' EXIT && ")
    if(ARG_DATA)
      string(APPEND script "data=$ACCELERATE_TEST_DATA && { test -n \"$data\" || { echo 'skipped: ACCELERATE_TEST_DATA is not set (scripts/test.sh sets it)'; exit; }; } && ")
    endif()
    string(APPEND script "$<TARGET_FILE:accelerate_cli> launch --cpu --num_processes 2 --main_process_port 0 $<TARGET_FILE:${name}> ${ARG_ARGS} && echo ended well")
    add_test(NAME example.${name} COMMAND sh -c "${script}")
    set_tests_properties(example.${name} PROPERTIES LABELS examples TIMEOUT 240 PASS_REGULAR_EXPRESSION "${ARG_OUTCOME}.*ended well" SKIP_REGULAR_EXPRESSION "skipped: ")
  endfunction()

  example_test(training_loop OUTCOME "accuracy (1|0\\.9[0-9]*) on 512 samples")
  example_test(nlp_example DATA ARGS "--model $data/minilm --pairs $data/pairs.tsv --train_size 32 --eval_size 18 --output_dir $scratch" OUTCOME "f1 [01].* on 18 held-out pairs")
  example_test(cv_example DATA ARGS "--data $data/mnist_5k.csv --epochs 1 --held_out 250" OUTCOME "epoch 1 accuracy 0\\.9[0-9]* on 250 held-out digits")
  example_test(gradient_accumulation OUTCOME "over 2 micro-batches on 2 process\\(es\\) the weight is 2\\.04000.*without accumulation the weight is 2\\.04000")
  example_test(multi_process_metrics OUTCOME "gather gave 112 samples, gather_for_metrics 101 of 101.*accuracy (1|0\\.9[0-9]*) with [0-9] mistakes")
  example_test(checkpointing ARGS "--project_dir $scratch" OUTCOME "kept 3 checkpoints; the resumed run ends with the same weights")
  example_test(automatic_batch_size OUTCOME "trying batch size 128.*trying batch size 64.*batch size 32 fits; accuracy in the last epoch 0\\.[89]")
  example_test(early_stopping OUTCOME "(^|\n)(\\[[^]]*\\] ?)?all processes stopped after step [0-9]+ \\(early\\)")
endif()
