# The shell blocks of the manual's pages leave this to their reader: functions that snippets.py calls before a block, in the folder
# of its page. $BIN holds the programs of this build, $SOURCE the repository, $DATA the data of the tests.

# A training program.
train() { ln -sf "$BIN/training_loop" train; }

# The repository as it lies there after a build.
repository() {
  mkdir -p build/release
  ln -sfn "$BIN" build/release/bin
  ln -sfn "$SOURCE/examples" examples
}

# A script to start somewhere.
script() { echo 'print("training")' >train.py; }

# A small language model.
smollm() {
  [ -n "$DATA" ] || { echo 'skipped: ACCELERATE_TEST_DATA is not set (scripts/test.sh sets it)'; exit 0; }
  ln -sf "$DATA/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf" model.gguf
}

# The checkpoint that two ranks wrote of a sharded model.
sharded_checkpoint() {
  accelerate launch --cpu --num_processes 2 "$BIN/docs_snippets" --save_sharded "$PWD/checkpoint"
}
