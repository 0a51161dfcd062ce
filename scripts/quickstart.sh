#!/usr/bin/env bash
# Two processes fine-tune a BERT on sentence pairs: installs what is missing, builds, fetches weights and data, trains.
#
#   scripts/quickstart.sh [--full] [arguments of nlp_example ...]
#
# Trains for about a minute on a quarter of the pairs; --full takes all of them.
# Builds what this needs and no more; scripts/install.sh builds the other programs, too, and installs everything.
# Run it as often as you like: what is there already is not done again. scripts/common.sh lists the environment variables.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

pairs=(--train_size 960 --eval_size 240) minutes="about a minute"
if [ "${1:-}" = --full ]; then
  shift
  pairs=() minutes="up to 5 minutes"
fi

bin=build/release/bin
out=build/nlp_example_output

step 1/5 "system packages"
install_system_packages
step 2/5 "LibTorch (a download of 200 MB the first time)"
find_torch
step 3/5 "building the library, the launcher and the example (6 to 9 minutes the first time on 2 cores; $(num_jobs) compilers at a time)"
build release accelerate_cli nlp_example
step 4/5 "weights and sentence pairs (100 MB the first time)"
fetch_data minilm pairs
# A relative path in the messages where the data lies in the repository.
data=${deps#"$root"/}/data

# With more than two cores each process gets its part of them.
threads=$(( $(cores) / 2 > 1 ? $(cores) / 2 : 1 ))
run=("$bin/accelerate" launch --num_processes 2 --num_cpu_threads_per_process "$threads"
     "$bin/nlp_example" --model "$data/minilm" --pairs "$data/pairs.tsv" --output_dir "$out" "${pairs[@]}" "$@")
step 5/5 "training ($minutes on 2 cores)"
printf '+ %s\n\n' "${run[*]}"
"${run[@]}"

cat <<END

The fine-tuned model lies in $out: config.json, vocabulary and model.safetensors, as Python's transformers reads them.

Next:
  $bin/accelerate launch --help    what the launcher can do
  examples/nlp_example.cpp                       the program that just ran
  scripts/quickstart.sh --full                   the same on all pairs
  scripts/quickstart.sh --epochs 2               with other settings
  scripts/install.sh DIR                         the library and all programs, for your own projects
  scripts/test.sh                                builds and runs all tests
END
