#!/usr/bin/env bash
# Tells what of this library works on this machine's GPU, and how fast: builds it, runs the tests labelled gpu, then the benchmarks against the Python peers, and writes
# one JSON and one Markdown table. Needs no network: LibTorch is the one that `python3 -c 'import torch'` has, headers and small libraries come from what
# scripts/gpu_bundle.sh has packed (.gpu_kit), where that is there, else from the system. Ends within 9 minutes.
#
#   scripts/gpu_check.sh [--out DIR] [--only NAME] [--seconds N] [--rehearse]
#
#   --out DIR     where gpu_check.json, gpu_check.md and the logs go (default: build/gpu_check)
#   --only NAME   machine, build, tests or benchmarks; may be given several times (default: all, in this order). The others need what build has made
#   --seconds N   when all must have ended (default: 530)
#   --rehearse    on the CPU where there is no GPU: the tests as far as they have a meaning there, the benchmarks with tiny models
#
# A step that fails or takes too long does not stop the rest. The exit status is 0 when nothing failed.
exec python3 "$(dirname "${BASH_SOURCE[0]}")/gpu_check.py" "$@"
