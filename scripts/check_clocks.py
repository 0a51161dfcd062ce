#!/usr/bin/env python3
"""Code that waits, or measures how long something takes, asks a clock that nobody sets: a jump of the wall clock (NTP, a
suspended machine, an administrator) must neither end a wait nor make it endless. tests/fault/wild_clock.cpp tries that;
this check finds readers of the wall clock that are not in the list of those who write down what time it is."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

STAMPS = {
    "src/accelerator/record.cpp": "the time of a failure, in the file that torchelastic reads",
    "src/launch/job/job.cpp": "a name for a run's logs",
    "src/launch/supervise/report.cpp": "the times of failures, for people and for torchelastic's readers",
    "include/accelerate/utils/log_sink.hpp": "the time of a log record",
    "src/utils/log.cpp": "the time of a log record",
    "src/utils/log_output.cpp": "the time of a log record, for people and collectors",
    "src/trackers/record.cpp": "when something was logged",
    "src/bigmodel/convert_files.cpp": "by which a later run knows the same input again",
    "programs/sagemaker/credentials.cpp": "a name for a session at Amazon's",
    "programs/sagemaker/job.cpp": "when a file in an archive was made",
    "programs/sagemaker/main.cpp": "a name for a job",
}
WALL = re.compile(
    r"\b(system_clock|file_clock|utc_clock|high_resolution_clock|gettimeofday|CLOCK_REALTIME|CLOCK_TAI|timespec_get|"
    r"last_write_time|pthread_cond_timedwait|pthread_mutex_timedlock|sem_timedwait|mq_timedreceive|mq_timedsend)\b|"
    r"\b(std::)?time\((nullptr|NULL|0|&)"
)


def main() -> int:
    used, problems = set(), []
    for folder in ("src", "include", "programs", "cli"):
        for path in sorted((ROOT / folder).rglob("*.[ch]pp")):
            name = str(path.relative_to(ROOT))
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.split("//")[0]
                if not WALL.search(code):
                    continue
                if name in STAMPS:
                    used.add(name)
                else:
                    problems.append(f"{name}:{number}: '{code.strip()}' is of the wall clock, expected steady_clock")
    problems += [f"{name} is in this check's list, but reads no wall clock" for name in sorted(STAMPS.keys() - used)]
    print("\n".join(problems) or f"check_clocks: {len(used)} files write down the time, 0 problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
