"""Is the exposed communication that merged traces show what switching communication off saves?

usage: judge.py BIN_FOLDER [--pairs 24] [--mb_per_second 50] [--folder FOLDER]

Two ranks train a sharded model of 21 M parameters; steps over a slow wire take turns with steps whose collectives
return at once. Each pair of steps gives what the second one saved, by the clock of the program, and by how much less
communication it exposed, by `accelerate profile merge` of the ranks' traces. Ends with 1 when the medians differ by
more than 5 %."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("bin", type=pathlib.Path)
    parser.add_argument("--pairs", type=int, default=24)
    parser.add_argument("--mb_per_second", type=float, default=50)
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    folder = args.folder or pathlib.Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    program = args.bin / "accelerate"
    subprocess.run([program, "launch", "--num_processes", "2", "--cpu", args.bin / "bench_exposed_communication",
                    folder, str(args.pairs), str(args.mb_per_second)], check=True)
    report = json.loads(subprocess.run([program, "profile", "merge", folder, "--json"], check=True,
                                       stdout=subprocess.PIPE, text=True).stdout)
    saved, exposed, step_ms = [], [], []
    for of_rank in report["ranks"]:
        times = [float(line) for line in (folder / f"times_{of_rank['rank']}.txt").read_text().split()]
        shown = [step["exposed_us"] / 1000 for step in of_rank["steps"]]
        if not len(times) == len(shown) == 2 * args.pairs:
            sys.exit(f"rank {of_rank['rank']}: found {len(times)} times and {len(shown)} steps in the trace, expected "
                     f"{2 * args.pairs}")
        step_ms += times[::2]
        saved += [on - off for on, off in zip(times[::2], times[1::2])]
        exposed += [on - off for on, off in zip(shown[::2], shown[1::2])]
    saving, seen = statistics.median(saved), statistics.median(exposed)
    error = seen / saving - 1
    print(f"a step of {statistics.median(step_ms):.0f} ms, of which {saving:.0f} ms are saved without communication; "
          f"exposed in the merged traces {seen:.0f} ms: {100 * error:+.1f} % "
          f"(means {statistics.mean(saved):.0f} and {statistics.mean(exposed):.0f} ms: "
          f"{100 * (statistics.mean(exposed) / statistics.mean(saved) - 1):+.1f} %)")
    return 0 if abs(error) <= 0.05 else 1


if __name__ == "__main__":
    sys.exit(main())
