#!/usr/bin/env python3
"""No test asserts how long something takes: on a machine that is slower, or busy, it would fail though nothing is wrong.
That something is linear shows by a count, or by an input so large that anything else takes an hour; that nobody waits
for ever shows by a deadline of ten times what an idle, slow machine needs (support/deadline.hpp, RankOptions::deadline,
TIMEOUT in CMake). This check finds comparisons of times in tests that are not in the list of those that hold anywhere."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A part of the line: why it holds on every machine.
HOLD_ANYWHERE = {
    "tests/cli/monitor_cli_test.cpp": {
        '"steps_per_second"], 0)': "a figure is there",
        '"steps_per_second"], 21)': "a sleep between the steps lasts at least as long as it says",
        "per_step(rank, ": "a rate in steps, whatever these take",
        "waited(0)": "a rank that sleeps keeps the other waiting",
    },
    "tests/cli/profile_cli_test.cpp": {
        '_us"], 0)': "a figure is there",
        '["communication_us"], rank["overall"]["exposed_us"])': "a part of it",
        "2 * 3 * 15'000": "a sleep lasts at least as long as it says",
        '["exposed_us"], report': "a rank that sleeps keeps the other waiting",
    },
    "tests/dist/pipeline_test.cpp": {"stage.milliseconds, 0": "a figure is there"},
    "tests/dist/profiler_test.cpp": {
        '["end_us"].get<double>(), steps[1]["begin_us"]': "an order",
        "found.error_ns": "an offset and its bound",
    },
    "tests/unit/monitor_test.cpp": {
        'history.json()["seconds"].size()': "a count",
        "measured, ": "what one process took, by two clocks",
    },
    "tests/unit/codes_test.cpp": {"share_of_this_thread": "of one process's processor time, whatever the machine does"},
    "tests/unit/timeline_report_test.cpp": {'["total_us"]': "a sum of given numbers"},
    "tests/unit/trace_test.cpp": {
        "events[0].begin_ns, outer.events[0].end_ns": "an order",
        "fetch.end_ns, wait.end_ns": "an order",
        "wait.end_ns, evict.begin_ns": "an order",
    },
    "tests/unit/tracker_queue_test.cpp": {"rows.at(0).time": "stamps that were made before and after it"},
}
COMPARISON = re.compile(r"\b(EXPECT|ASSERT)_(LT|LE|GT|GE|NEAR)\(|\bassert\b|\b(Lt|Le|Gt|Ge)\(")
TIME = re.compile(
    r"\bnow\(\)|\bclock\w*\(|_(us|ms|ns)\b|\b\w*(chrono|elapsed|duration|took|seconds|per_second|waited|measured)\w*\b|"
    r"\b(share_of_\w+|time)\b|monotonic|perf_counter|time\.time|getrusage|\bru_[us]time\b", re.IGNORECASE)


def statements(text: str):
    """Lines, an expression of several as one, with the number of its first."""
    held, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].rstrip()
        if held or (COMPARISON.search(line) and line.count("(") > line.count(")")):
            held, first = held + line.strip() + " ", first or number
            if held.count("(") > held.count(")"):
                continue
            line, number = held, first
            held, first = "", 0
        yield number, line.strip()


def main() -> int:
    used, problems = set(), []
    for path in sorted(p for end in ("*.[ch]pp", "*.py") for p in (ROOT / "tests").rglob(end)):
        name = str(path.relative_to(ROOT))
        if name.startswith("tests/mutations/"):
            continue
        for number, line in statements(path.read_text(errors="replace")):
            # Messages and names do not count.
            code = re.sub(r'<< *"[^"]*"', "", line)
            if not COMPARISON.search(code) or not TIME.search(code):
                continue
            reasons = [part for part in HOLD_ANYWHERE.get(name, {}) if part in code]
            used.update((name, part) for part in reasons)
            if not reasons:
                problems.append(f"{name}:{number}: '{code}' compares times, expected a count, or a deadline that ends the "
                                "test (see the head of this script)")
    problems += [f"{name}: no comparison with '{part}' any more, which this check's list has"
                 for name, parts in HOLD_ANYWHERE.items() for part in parts if (name, part) not in used]
    print("\n".join(problems) or f"check_times: {len(used)} comparisons that hold anywhere, 0 problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
