# Every example is a witness: it runs on one process and, under DDP and --use_fsdp, by shared memory and through sockets, twice on two, on a small input, and what it
# prints has to be the same (witness.py). Those that need files get them from $ACCELERATE_TEST_DATA when they run; without it they count as skipped and say so.
if(NOT ACCELERATE_EXAMPLES)
  return()  # of this file
endif()
find_package(Python3 REQUIRED COMPONENTS Interpreter)

# witness(name OUTCOME regex [ARGS text] [DATA] [NEAR n] [TOLERANCE n] [ALONE text] [SHARDED flags...] [REFUSED text]): in ARGS, $data is the folder of the data,
# $digits a file with a fourth of its digits, $bert a small model and $scratch an empty folder. OUTCOME is of what it prints, and has the numbers that are compared in groups; ALONE are its arguments on one process, where the same batches
# need others. SHARDED are flags of further sharded kinds, REFUSED the error of an example that can't be sharded.
function(witness name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "DATA" "OUTCOME;ARGS;NEAR;TOLERANCE;ALONE;REFUSED" "SHARDED")
  string(REPLACE ";" "\\;" ARG_OUTCOME "${ARG_OUTCOME}")
  set(options --bin ${CMAKE_RUNTIME_OUTPUT_DIRECTORY} --source ${PROJECT_SOURCE_DIR} --outcome "${ARG_OUTCOME}")
  foreach(option NEAR TOLERANCE REFUSED)
    if(DEFINED ARG_${option})
      string(TOLOWER ${option} flag)
      list(APPEND options --${flag} ${ARG_${option}})
    endif()
  endforeach()
  foreach(flags ${ARG_SHARDED})
    list(APPEND options "--sharded= ${flags}")
  endforeach()
  if(ARG_ALONE)
    list(APPEND options "--alone=${ARG_ALONE}")
  endif()
  if(ARG_DATA)
    list(APPEND options --needs_data)
  endif()
  separate_arguments(words UNIX_COMMAND "${ARG_ARGS}")
  add_test(NAME example.${name} COMMAND Python3::Interpreter ${TEST_DIR}/witness.py ${options} ${name} -- ${words})
  set_tests_properties(example.${name} PROPERTIES LABELS examples TIMEOUT 900 COST 20 SKIP_REGULAR_EXPRESSION "skipped: ")
endfunction()

# example_test(name CASE case OUTCOME regex [DATA] [SHARDED | FLAGS text] [ARGS text]): something else that it does, or what it leaves behind, looked at once; $run starts it once more.
function(example_test name)
  cmake_parse_arguments(PARSE_ARGV 1 ARG "DATA;SHARDED" "OUTCOME;ARGS;CASE;FLAGS" "")
  set(flags --cpu)
  if(ARG_SHARDED)
    set(flags --use_fsdp)
  elseif(ARG_FLAGS)
    set(flags ${ARG_FLAGS})
  endif()
  set(test example.${name}.${ARG_CASE})
  set(script "scratch=$(mktemp -d) && trap 'rm -rf \"$scratch\"' EXIT && ")
  if(ARG_DATA)
    string(APPEND script "data=$ACCELERATE_TEST_DATA && { test -n \"$data\" || { echo 'skipped: ACCELERATE_TEST_DATA is not set (scripts/test.sh sets it)'; exit; }; } && digits=$scratch/digits.csv && awk 'NR % 4 == 1' \"$data/mnist_5k.csv\" > $digits && ")
  endif()
  string(APPEND script "run='$<TARGET_FILE:accelerate_cli> launch ${flags} --num_processes 2 --main_process_port 0 ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/${name}' && $run ${ARG_ARGS} && echo ended well")
  add_test(NAME ${test} COMMAND sh -c "${script}")
  set_tests_properties(${test} PROPERTIES LABELS examples TIMEOUT 900 PASS_REGULAR_EXPRESSION "${ARG_OUTCOME}.*ended well" SKIP_REGULAR_EXPRESSION "skipped: ")
endfunction()

set(bert "--model $data/minilm --pairs $data/pairs.tsv")
set(small_bert "--model $bert --pairs $data/pairs.tsv")  # of the same tokenizer
witness(training_loop OUTCOME "accuracy (1|0\\.9[0-9]*) on 512 samples")
witness(nlp_example DATA NEAR 0.5 ARGS "${small_bert} --train_size 48 --eval_size 30 --output_dir $scratch" OUTCOME "epoch 1 accuracy ([01][.0-9]*) f1 ([01][.0-9]*) on 30 held-out pairs")
witness(cv_example DATA TOLERANCE 0.01 NEAR 0.1 ARGS "--data $digits --epochs 1 --held_out 400 --batch_size 16" OUTCOME "epoch 1 accuracy (0\\.[89][0-9]*) on 400 held-out digits")
witness(complete_nlp_example DATA NEAR 0.5 ARGS "${small_bert} --train_size 24 --eval_size 30 --batch_size 4 --num_epochs 1 --output_dir $scratch --project_dir $scratch/logs"
        OUTCOME "epoch 0 accuracy ([01][.0-9]*) f1 ([01][.0-9]*) train_loss (0\\.[0-9]+)")
witness(complete_cv_example DATA TOLERANCE 0.01 NEAR 0.1 ARGS "--data $digits --num_epochs 1 --held_out 400 --batch_size 16 --output_dir $scratch --project_dir $scratch/logs"
        OUTCOME "epoch 0 accuracy (0\\.[89][0-9]*) train_loss (0\\.[0-9]+)")
witness(distributed_inference DATA ARGS "--model $data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --max_new_tokens 8"
        OUTCOME "capital of France\\? -> [^\n]*Paris.*capital of Japan\\? -> [^\n]*Tokyo.*(5) of 5 questions were answered by")
witness(gradient_accumulation NEAR 0 OUTCOME "over [24] micro-batches on [12] process\\(es\\) the weight is (2\\.04000).*without accumulation the weight is (2\\.04000)")
witness(multi_process_metrics NEAR 4 ARGS "--epochs 4" OUTCOME "gather_for_metrics (101) of 101.*accuracy (0\\.[89][0-9]*) with ([0-9]+) mistakes")
witness(checkpointing ARGS "--project_dir $scratch --epochs 2" OUTCOME "kept ([23]) checkpoints; the resumed run ends with the same weights" NEAR 1)
witness(automatic_batch_size NEAR 0.1 ARGS "--epochs 6" OUTCOME "trying batch size 128.*trying batch size 64.*batch size 32 fits; accuracy in the last epoch (0\\.[89][0-9]*)")
witness(struct_samples NEAR 15 ARGS "--epochs 3" OUTCOME "Lima (1[2-7][0-9]) of 170 right.*Oslo (1[2-7][0-9]) of 170 right.*Pune (1[2-7][0-9]) of 170 right")
witness(collate NEAR 0.1 ARGS "--epochs 4" OUTCOME "of them [45][0-9] % blends.*accuracy (1|0\\.[89][0-9]*) on 512 unmixed points")
witness(variable_length NEAR 0.15 ARGS "--epochs 4" OUTCOME "500 sequences, ([0-9]+) letters in [0-9]+ places; marked right: (0\\.[89][0-9]*)")
witness(streams NEAR 0 ARGS "--file $scratch/measurements.csv" OUTCOME "one pass: (1003) lines over .*found y = (3\\.0) x [+] (-1\\.0)")
witness(torchscript_model NEAR 0.05 ARGS "--epochs 5 --file $scratch/model.pt" OUTCOME "accuracy (1|0\\.9[0-9]*) on 512 points.*the saved program gives the same answer")
witness(two_models NEAR 2 ARGS "--epochs 10" OUTCOME "radius of [0-9]+ drawn points: ([0-3]\\.[0-9]*) [+]- ([0-9.]+) .*generators of all processes are equal")
witness(fp8 TOLERANCE 0.05 NEAR 0.05 ARGS "--train_size 256 --epochs 3" ALONE "--train_size 256 --epochs 3 --batch_size 64"
        OUTCOME "bf16: 0 forward products in fp8, mean loss of the last epoch (0\\.[0-9]+)\n.*delayed scaling: (24) forward products in fp8, mean loss of the last epoch (0\\.[0-9]+).*blocks of 32: 24 .* epoch (0\\.[0-9]+).*scales as they are now: 24 .* epoch (0\\.[0-9]+)")
witness(lora DATA NEAR 0.5 ARGS "${small_bert} --train_size 48 --eval_size 30 --only adapters --output_dir $scratch/adapter" REFUSED "AdamW8bit for parameters that are sharded"
        OUTCOME "adapters: (3138) of 1[0-9]* elements are trained; accuracy ([01][.0-9]*) on 30.*held-out loss ([01][.0-9]*)")
witness(frozen_layers NEAR 0.15 ARGS "--epochs 8" OUTCOME "loss (0\\.[2-9][0-9]*) -> (0\\.[01][0-9]*).*tensors that changed: backbone (0) of 7 , head (2) of 2")
witness(parameter_groups NEAR 0.3 ARGS "--epochs 3" OUTCOME "backbone: 3 tensors at rate (0\\.0005[0-9]*) with decay 0\n.*backbone: 1 tensors at rate 0\\.0005[0-9]* with decay 0\\.1.*head: 1 tensors at rate (0\\.005[0-9]*) with decay 0\n.*head: 1 tensors at rate 0\\.005[0-9]* with decay 0\\.1.*loss (0\\.[6-9][0-9]*) -> (0\\.[0-5][0-9]*)")
witness(activation_checkpointing ARGS "--blocks 4 --rows 512" OUTCOME "the gradients of ([0-9]+) tensors are equal to the bit")
witness(memory ARGS "--width 256 --layers 4" OUTCOME "process 0, after prepare: [0-9]+ MiB, .*process 0, after step 1: .*models: parameters .*in full: host: [0-9.]+ MiB resident")
witness(monitoring NEAR 1 ARGS "--epochs 1 --width 32" OUTCOME "encoder\\.layers\\.0 .*tied, and counted once: 1.*epoch 1 loss ([0-9.]+)")
witness(ema NEAR 0.3 ARGS "--epochs 4" OUTCOME "held-out loss with the weights: (0\\.[0-9]+) to (0\\.[0-9]+).*their average: (0\\.[0-9]+) to (0\\.[0-9]+)")
witness(tracking NEAR 40 ARGS "--epochs 3 --project_dir $scratch" OUTCOME "configuration: lr = 0\\.02.*best loss (0\\.[0-9]+) at step ([0-9]+).*logged (?:24|48) steps to ")
witness(fsdp_with_peak_mem_tracking DATA TOLERANCE 0.001 NEAR 0.5 SHARDED "--fsdp_version 2" ARGS "--gpt --pairs $data/pairs.tsv --train_size 4 --batch_size 2"
        OUTCOME "first backward: whole parameters at most [0-9]+ MiB.*loss (5\\.[0-9]+) -> ([345]\\.[0-9]+) in (2) steps on [12] process.*sharded: FSDP")
witness(big_init NEAR 0.5 SHARDED "--fsdp_version 2" ARGS "--config ${PROJECT_SOURCE_DIR}/examples/configs/llama-3-8b --steps 3"
        OUTCOME "built (8030261248) parameters, eagerly 30633 MiB, in [0-9]?[0-9] MiB of memory.*loss ([0-9.]+) -> ([0-9.]+) in 3 steps on [12] process")
# A language model from scratch, of the tiny shape beside this file: the same batches as one process has.
set(llm "--model ${TEST_DIR}/tiny_llama --tokenizer $data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --data $data/pairs.tsv --seq_length 32 --log_every 1 --lr 1e-2 --max_new_tokens 4")
witness(train_llm DATA TOLERANCE 0.0001 NEAR 0.001 SHARDED "--fsdp_version 2" ARGS "${llm} --batch_size 2 --max_steps 3 --output_dir $scratch" ALONE "${llm} --batch_size 4 --max_steps 3 --output_dir $scratch"
        OUTCOME "step 1 loss (10\\.[0-9]+), .*step 3 loss (10\\.[0-9]+), .*the weights are in .*sample: In the beginning")
witness(pippy_inference ARGS "--repeats 1" OUTCOME "(8) rows in [14] parts over [12] processes.*results are equal to the bit")
witness(ddp_comm_hook NEAR 0.15 ARGS "--epochs 3" REFUSED "comm_hook is power_sgd, but models are sharded" OUTCOME "with the hook power_sgd accuracy (1|0\\.[89][0-9]*)")
witness(local_sgd NEAR 0.15 ARGS "--epochs 3" REFUSED "LocalSGD: the ranks hold one replica of the model together" OUTCOME "met after each 8.*the models are equal.*accuracy (1|0\\.[89][0-9]*) on 256 points")
witness(cross_validation NEAR 0.1 ARGS "--folds 2 --epochs 4" OUTCOME "fold 2 accuracy (1|0\\.[89][0-9]*) on .*together accuracy (1|0\\.[89][0-9]*) on 256 test points")
witness(schedule_free NEAR 0.1 ARGS "--num_epochs 4" OUTCOME "epoch 3 accuracy (1|0\\.9[0-9]*) on 256 held-out points")
witness(early_stopping NEAR 2000 ARGS "--goal 0.2" OUTCOME "all processes stopped after step ([0-9]+) \\(early\\)")
witness(profiler NEAR 100 OUTCOME "recorded [1-9][0-9]* calls in (2) of ([0-9]+) steps")

# Everything on, and once more from a checkpoint: in the middle of an epoch and of an accumulation group, or between epochs.
function(complete_example_test name checkpoints checkpoint flags outcome)
  set(flags "--mixed_precision bf16 --gradient_accumulation_steps 2 --with_tracking --checkpointing_steps ${checkpoints} ${flags}")
  set(from "--project_dir $scratch/resumed_logs --output_dir $scratch/resumed --resume_from_checkpoint $scratch/whole/${checkpoint}")
  example_test(${name} CASE resumed DATA ARGS "${flags} --project_dir $scratch/logs --output_dir $scratch/whole && $run ${flags} ${from} && ls $scratch/logs/${name} && cmp $scratch/whole/model.safetensors $scratch/resumed/model.safetensors && echo equal to the bit" OUTCOME "saved [^\n]*/${checkpoint}.*resumed from [^\n]*/${checkpoint} after step ${outcome}.*events\\.out\\.tfevents.*log\\.jsonl.*equal to the bit")
endfunction()
complete_example_test(complete_nlp_example 4 step_4 "${bert} --train_size 24 --eval_size 10 --batch_size 8 --num_epochs 2" "4\n.*epoch 1 accuracy [01].* f1 [01].*after 6 steps the model is in")
complete_example_test(complete_cv_example epoch epoch_0 "--data $digits --num_epochs 2 --held_out 400 --batch_size 16" "53\n.*epoch 1 accuracy 0\\.[89].*after 106 steps the model is in")
example_test(train_llm CASE resumed DATA SHARDED ARGS "${llm} --batch_size 2 --max_steps 4 --save_every 2 --output_dir $scratch/whole && cp -r $scratch/whole $scratch/resumed && rm -r $scratch/resumed/checkpoints/checkpoint_1 $scratch/resumed/model.safetensors && $run ${llm} --batch_size 2 --max_steps 4 --save_every 2 --output_dir $scratch/resumed --resume && ls $scratch/resumed/checkpoints && cmp $scratch/whole/model.safetensors $scratch/resumed/model.safetensors && echo equal to the bit"
             OUTCOME "saved [^\n]*/checkpoint_1.*resumed after step 2.*step 4 loss.*checkpoint_0\ncheckpoint_1.*equal to the bit")
example_test(train_llm CASE qlora DATA SHARDED ARGS "${llm} --batch_size 2 --max_steps 1 --output_dir $scratch/base && $run --data ${TEST_DIR}/tiny_llama/chat.jsonl --tokenizer $data/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf --model $scratch/base --seq_length 32 --batch_size 1 --max_steps 2 --log_every 1 --load_in_4bit --activation_checkpointing --with_tracking --max_new_tokens 2 --output_dir $scratch/adapter && ls $scratch/adapter $scratch/adapter/train_llm"
             OUTCOME "12288 of 1613024 parameters are trained.*step 2 loss [0-9.]+, .*the adapter is in.*adapter_config.json\nadapter_model.safetensors.*log.jsonl")
example_test(memory CASE peaks OUTCOME "process 0, after prepare: [0-9]+ MiB, .*process 1, after prepare: .*process 0, after step 1: [2-5][0-9][0-9] MiB, at most [2-5][0-9][0-9] MiB.*models: parameters 64.1 MiB, gradients 0.0 MiB, optimizer 128.1 MiB; buffers of communication 64.1 MiB.*process 1, after the end: [0-9][0-9]? MiB, at most .*in full: host: [0-9.]+ MiB resident")
example_test(monitoring CASE sharded ARGS "--sharded" OUTCOME "sharded over 2 ranks.*in memory of each of 2 ranks: [0-9.]+ KiB sharded.*epoch 2 loss [0-9.]+")
example_test(activation_checkpointing CASE memory OUTCOME "without checkpoints the forward pass keeps [0-9][0-9] MiB.*with checkpoints the forward pass keeps [0-9] MiB.*the gradients of 72 tensors are equal to the bit")
example_test(tracking CASE files ARGS "--project_dir $scratch && ls $scratch/moons && grep -c kind $scratch/moons/log.jsonl" OUTCOME "configuration: lr = 0\\.02.*best loss 0\\.[0-9]+ at step [0-9]+.*logged 40 steps to .*events\\.out\\.tfevents\\.[^\n]*\\.moons.*hparams\\.yml.*log\\.jsonl\n59\n")
example_test(fsdp_with_peak_mem_tracking CASE bert DATA ARGS "${bert} --train_size 48" OUTCOME "first backward: whole parameters at most [0-9]+ MiB.*loss 0\\.[0-9]+ -> 0\\.[0-9]+ in 3 steps on 2 process.* sharded: FSDP")
example_test(ddp_comm_hook CASE own ARGS "--hook own" OUTCOME "with the hook own accuracy (1|0\\.[89][0-9]*)")
example_test(local_sgd CASE diloco ARGS "--diloco" OUTCOME "the models are equal.*accuracy (1|0\\.[89][0-9]*) on 256 points")
example_test(lora CASE in_4bit DATA ARGS "--load_in_4bit ${bert} --train_size 32 --eval_size 18 --output_dir $scratch/adapter && ls $scratch/adapter" OUTCOME "adapters: 111362 of 2[0-9]* elements are trained; accuracy [01].* on 18.*held-out loss [01].*in full: .*held-out loss [01].*adapter_config.json\nadapter_model.safetensors")
# On one process.
add_test(NAME example.dry_run COMMAND ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/dry_run --config ${PROJECT_SOURCE_DIR}/examples/configs/llama-3-8b --num_processes 64)
set_tests_properties(example.dry_run PROPERTIES LABELS examples TIMEOUT 600 PASS_REGULAR_EXPRESSION "64 processes, 8.03 G parameters.*model states after the step.*\\([+-][01]\\.[0-9]+ %\\)")
add_test(NAME example.train_llm.dry COMMAND ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/train_llm --model ${PROJECT_SOURCE_DIR}/examples/configs/llama-2-7b --dtype bfloat16 --dry_run 8 --batch_size 10 --seq_length 1024 --numel_to_wrap 100_000_000 --cpu_offload)
set_tests_properties(example.train_llm.dry PROPERTIES LABELS examples TIMEOUT 600 PASS_REGULAR_EXPRESSION "8 processes, each: valley 9\\.9 GB, peak 81\\.[0-9] GB on the accelerator\nand on the host 5\\.1 GB")  # as docs/train_a_language_model.md says
add_test(NAME example.train_llm.names COMMAND sh -c "for name in gpt2 llama llama-2-7b; do ${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/train_llm --model $name --dry_run 8 --seq_length 64 || exit 1; done && echo all of them" WORKING_DIRECTORY ${PROJECT_SOURCE_DIR})
set_tests_properties(example.train_llm.names PROPERTIES LABELS examples TIMEOUT 600 PASS_REGULAR_EXPRESSION "valley.*valley.*valley.*all of them")
add_test(NAME example.big_model_inference COMMAND sh -c "scratch=$(mktemp -d) && trap 'rm -rf \"$scratch\"' EXIT && run='${CMAKE_RUNTIME_OUTPUT_DIRECTORY}/big_model_inference --model '$scratch/big && $run --write_random 40MB && $run --dtype float16 | tee $scratch/whole && $run --dtype float16 --max_memory 100MB | tee $scratch/little && \
grep -o 'bits of all logits [0-9a-f]*' $scratch/whole > $scratch/bits && grep -f $scratch/bits $scratch/little && echo equal to the bit")
set_tests_properties(example.big_model_inference PROPERTIES LABELS examples TIMEOUT 600 PASS_REGULAR_EXPRESSION "wrote [0-9]+ bytes.*units are read when they are used.*equal to the bit")
set(deepspeed "--use_deepspeed --mixed_precision bf16 --deepspeed_config_file ${PROJECT_SOURCE_DIR}/examples/configs/deepspeed")
example_test(deepspeed_with_config_support CASE resumed FLAGS "${deepspeed}/zero_stage2_config.json"
  ARGS "--num_train_epochs 2 --output_dir $scratch && $run --num_train_epochs 3 --output_dir $scratch --resume_from_checkpoint $scratch/epoch_1"
  OUTCOME "epoch 1 perplexity 2[0-9]\\.[0-9]+.*28 weights in fp32 from .*goes on after epoch_1.*epoch 2 perplexity 1[0-9]\\.[0-9]")
foreach(template zero_stage1 zero_stage3_offload)
  example_test(deepspeed_with_config_support CASE ${template} FLAGS "${deepspeed}/${template}_config.json" ARGS "--num_train_epochs 1 --output_dir $scratch" OUTCOME "epoch 0 perplexity 6[0-9]\\.[0-9]+.*28 weights in fp32 from ")
endforeach()
example_test(deepspeed_two_models CASE distils ARGS "--epochs 10" OUTCOME "student and teacher differ by 0\\.[0-2][0-9]")
example_test(train_llm CASE deepspeed DATA FLAGS "--use_deepspeed --zero_stage 2" ARGS "${llm} --batch_size 2 --max_steps 2 --save_every 2 --output_dir $scratch" OUTCOME "process.es.: DEEPSPEED.*step 2 loss 1[01]\\.[0-9]+.*saved ")
