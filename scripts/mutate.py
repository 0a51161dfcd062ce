#!/usr/bin/env python3
"""Proves the tests of options: takes out each option's effect in turn, and sees the option's test fail.

tests/mutations/ lists the faults, with the tests that have to notice each. All are compiled in at once, in a
copy of the sources, as `fault("name") ? wrong : right`; ACCELERATE_FAULT names the one that is active in a run, so that
hundreds of faults cost one build. Each test is run once without any fault, where it must pass, and once with each of
its faults, where it must fail. Where a test passes all the same the fault has survived, and the exit status is 1.

--check only looks whether each fault's text stands in the sources, exactly once, and its tests exist: ctest does that
(structure.mutations), so that the list follows the sources. It also finds option fields that have neither a fault nor a
reason for having none.

The copy is built in --copy (build/mutants here), preset release; what ccache has is not compiled again.

--others says for each fault which tests of other faults fail as well: the proof that a test is about its option.

--fuzzer asks the equivalence fuzzer, in place of the tests, about the faults in engines (tests/mutations/engines.py):
each gets fresh seeds for up to --minutes, and a case that fails is tried without the fault. First it runs for a minute
without any, and the faults that no case came by are named. The exit status is 1 where less than 80 % are noticed.

usage: mutate.py [--check] [--copy FOLDER] [--jobs N] [--build-only | --run-only] [--at-once N] [--others]
                 [--fuzzer [--minutes M] [--from SEED]] [NAME ...]
"""
import argparse
import collections
import concurrent.futures
import fnmatch
import importlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests/mutations"), str(ROOT / "scripts")]
sys.dont_write_bytecode = True
import check_options  # noqa: E402
import engines  # noqa: E402
import faults as listed  # noqa: E402

for path in sorted((ROOT / "tests/mutations").glob("*.py")):  # a layer may bring its own
    importlib.import_module(path.stem)

# A test that hangs has noticed: with a fault it may take so many times what it took without, and at least so many seconds,
# since machines have other things to do. Without a fault, it may take the seconds of a whole run of ctest.
TIMES, LEAST_SECONDS, SECONDS_WITHOUT = 5, 120, 720


def pattern_of(text):
    """A regular expression for a text of the sources however it is broken into lines."""
    return r"\s+".join(re.escape(word) for word in text.split())


def place_of(fault, source):
    """(begin, end) of what the fault replaces. @throws ValueError"""
    if fault.text.count("«") != 1 or fault.text.count("»") != 1:
        raise ValueError("its text marks no part to replace with « and »")
    before, right, after = re.split("[«»]", fault.text)
    expression = "".join((pattern_of(before), r"\s*" if before.strip() else "", f"({pattern_of(right)})",
                          r"\s*" if after.strip() else "", pattern_of(after)))
    found = list(re.finditer(expression, source))
    if len(found) != 1:
        raise ValueError(f"its text is found {len(found)} times in {fault.file}, expected once: {fault.text}")
    begin, end = found[0].span(1)
    if right.rstrip().endswith(";") and source[:begin].rstrip()[-1] not in "{};)":
        raise ValueError(f"what it replaces ends as a statement does, and begins in the middle of one: {fault.text}")
    return begin, end


def replacement(fault, right):
    name = f'std::string("{fault.name}") + {fault.each}' if fault.each else f'"{fault.name}"'
    active = f"mutations::fault({name})"
    if right.rstrip().endswith(";"):
        return f"{{ if ({active}) {{ {fault.wrong} }} else {{ {right} }} }}"
    return f"({active} ? ({fault.wrong}) : ({right}))"


def with_faults(path, source, faults):
    """The source with all its faults compiled in. @throws ValueError"""
    places = sorted(((*place_of(fault, source), fault) for fault in faults), key=lambda place: place[:2])
    for (_, end, one), (begin, _, other) in zip(places, places[1:]):
        if begin < end:
            raise ValueError(f"the faults '{one.name}' and '{other.name}' replace the same text of {path}")
    for begin, end, fault in reversed(places):
        source = source[:begin] + replacement(fault, source[begin:end]) + source[end:]
    header = os.path.relpath(ROOT / "tests/mutations/fault.hpp", (ROOT / path).parent)
    return f'#include "{header}"\n{source}'


def runs_of(faults):
    """{name: tests} of what can be active. Rows of one name are one fault; a family has one for each of its names."""
    runs = {}
    for fault in faults:
        for suffix in fault.of or ("",):
            its_tests = runs.setdefault(fault.name + suffix, [])
            its_tests += [test for test in fault.tests if test not in its_tests]
    return runs


def by_file(faults):
    files = collections.defaultdict(list)
    for fault in faults:
        files[fault.file].append(fault)
    return files


def known_tests():
    """{binary: names of its tests}, as the sources and the fragments of CMake say."""
    declared = re.compile(r"^(?:TEST|TEST_F|TEST_P|RANKS_TEST)\(\s*(\w+),\s*(\w+)", re.M)
    tests = {}
    call = re.compile(r"accelerate_test\(NAME (\w+)\s+SOURCES (.*?)\)\s*$", re.M | re.S)
    for fragment in (ROOT / "tests").glob("*/*.cmake"):
        for name, sources in call.findall(fragment.read_text()):
            files = [fragment.parent / file for file in re.findall(r"\$\{TEST_DIR\}/([\w/]+\.cpp)", sources)]
            tests[name] = {".".join(test) for file in files for test in declared.findall(file.read_text())}
    tests["equivalence"] = {"fuzzer"}
    tests["conformance_tests"] = {cases.stem for cases in (ROOT / "tests/conformance/cases").glob("*.json")}
    return tests


def check(faults):
    problems, tests = [], known_tests()
    for path, of_file in by_file(faults).items():
        try:
            source = (ROOT / path).read_text()
            for fault in of_file:
                place_of(fault, source)
            with_faults(path, source, of_file)
        except (OSError, ValueError) as error:
            problems.append(f"{path}: {error}")
    for fault in faults:
        for test in fault.tests:
            binary, _, name = test.partition(" ")
            if not any(fnmatch.fnmatch(one, name) for one in tests.get(binary, ())):
                problems.append(f"fault '{fault.name}': there is no test {test}")
    problems += [f"fault '{name}' has no test" for name, its_tests in runs_of(faults).items() if not its_tests]
    of_engines = {name for fault in faults if fault.file.startswith(engines.ENGINES) for name in runs_of([fault])}
    for pattern in engines.NOT_DRAWN:
        if not fnmatch.filter(of_engines, pattern):
            problems.append(f"NOT_DRAWN of tests/mutations/engines.py names {pattern}, which is no fault in an engine")
    # An option is proved by a fault of its name: Struct::field, or that and more words.
    proved = {name.split()[0] for name in runs_of(faults)}
    fields = {f"{struct}::{field}" for struct, field in check_options.fields()}
    excused = {field for field in fields if field in listed.WITHOUT or field.partition("::")[0] in listed.WITHOUT}
    for field in sorted(fields - proved - excused):
        problems.append(f"{field} has no fault, and tests/mutations/faults.py says no reason (WITHOUT) why not")
    for name in listed.WITHOUT:
        if name not in fields and name not in {field.partition("::")[0] for field in fields}:
            problems.append(f"WITHOUT names {name}, which is no option")
        if name in proved:
            problems.append(f"WITHOUT names {name}, which has a fault: take it off the list")
    return problems, len(fields & proved), len(fields)


def copy_tree(copy, faults):
    """Makes the copy what the sources are, with faults; files that stay as they were keep their dates."""
    listing = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, stdout=subprocess.PIPE,
                             text=True, check=True)
    faulty, wanted = by_file(faults), set(listing.stdout.split("\0")[:-1])
    for name in wanted:
        source, target = ROOT / name, copy / name
        if not source.is_file():
            continue
        content = source.read_bytes()
        if name in faulty:
            content = with_faults(name, content.decode(), faulty[name]).encode()
        if target.is_file() and target.read_bytes() == content:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(source.stat().st_mode)
    for folder in ("src", "include", "cli", "programs", "tests"):
        for path in (copy / folder).rglob("*"):
            if path.is_file() and str(path.relative_to(copy)) not in wanted and "__pycache__" not in path.parts:
                path.unlink()
    if (ROOT / ".deps").exists() and not (copy / ".deps").exists():
        (copy / ".deps").symlink_to((ROOT / ".deps").resolve())


def build(copy, binaries, jobs):
    if not (copy / "build/release/build.ninja").exists():
        configure = 'source scripts/common.sh && find_torch && cmake --preset release -DTorch_DIR="$torch_dir"'
        subprocess.run(["bash", "-c", configure], cwd=copy, check=True)
    # All that does not compile is named, as a fault alone may be at fault.
    command = ["cmake", "--build", "--preset", "release", "-j", str(jobs), "--target", *sorted(binaries),
               "--", "-k", "0"]
    subprocess.run(command, cwd=copy, check=True)


class Fuzzer:
    """The request to `equivalence`; without a fault one minute shows that it is clean."""
    minutes, first, kept = 10.0, "1", "build/equivalence-failures"


def arguments_of(copy, test, fault):
    binary, _, name = test.partition(" ")
    if binary == "equivalence":
        if name != engines.FUZZER.partition(" ")[2]:  # a case of a seed
            return ["--no-shrink", copy / Fuzzer.kept / f"{name}.case"]
        minutes = str(Fuzzer.minutes if fault else 1)
        return ["--minutes", minutes, "--from", Fuzzer.first, "--stop", "--no-shrink", "--keep", copy / Fuzzer.kept]
    if binary == "conformance_tests":
        return ["--cases", copy / "tests/conformance/cases", "--only", name]
    return ["--gtest_filter=" + ":".join(f"{one}:*/{one}/*" for one in name.split(":"))]  # with parameters, too


def run_test(copy, test, fault="", limit=SECONDS_WITHOUT, **variables):
    """(passed, output, seconds); limit is in seconds, variables are for the test."""
    binary, _, name = test.partition(" ")
    arguments = arguments_of(copy, test, fault)
    begin = time.monotonic()
    process = subprocess.Popen([copy / "build/release/bin" / binary, *arguments], cwd=copy / "build/release/tests",
                               stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               errors="replace", env={**os.environ, "ACCELERATE_FAULT": fault, **variables},
                               start_new_session=True)
    try:
        output = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output = process.communicate()[0] + f"\nkilled after {limit:.0f} s"
    of_gtest = arguments[0].startswith("--gtest")
    if process.returncode == 0 and of_gtest and not re.search(r"\[  PASSED  \] [1-9]", output):
        output += "\nno test ran"
        return False, output, time.monotonic() - begin
    return process.returncode == 0, output, time.monotonic() - begin


def others_that_fail(copy, its_tests, all_tests, name):
    """Tests of other faults, of the same binaries, that this fault fails as well."""
    failing = []
    for binary in {test.split()[0] for test in its_tests} - {"conformance_tests"}:
        others = [test.partition(" ")[2] for test in all_tests if test.split()[0] == binary and test not in its_tests]
        if others:
            output = run_test(copy, f"{binary} {':'.join(others)}", name)[1]
            failing += sorted(set(re.findall(r"^\[  FAILED  \] ((?:\w+/)?\w+\.\w+)", output, re.M)))
    return failing


def run(copy, runs, others, at_once):
    survived, limits, counts = [], {}, collections.defaultdict(collections.Counter)
    tests = sorted({test for its_tests in runs.values() for test in its_tests})
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        found = zip(tests, pool.map(lambda test: run_test(copy, test), tests))
        for number, (test, (passed, output, seconds)) in enumerate(found, 1):
            outcome = "passes" if passed else "FAILS"
            print(f"[{number}/{len(tests)}] without a fault: {test} {outcome} ({seconds:.1f} s)", flush=True)
            if passed:
                limits[test] = max(LEAST_SECONDS, TIMES * seconds)
                if test == engines.FUZZER:
                    limits[test] += 60 * Fuzzer.minutes
            else:
                print(output[-3000:])
        pairs = [(name, test) for name, its_tests in runs.items() for test in its_tests if test in limits]
        found = zip(pairs, pool.map(lambda pair: run_test(copy, pair[1], pair[0], limits[pair[1]]), pairs))
        for number, ((name, test), (passed, _, seconds)) in enumerate(found, 1):
            outcome = "SURVIVED" if passed else "caught"
            counts[test.split()[0]][outcome] += 1
            print(f"[{number}/{len(pairs)}] {outcome}: {name} by {test} ({seconds:.1f} s)", flush=True)
            if passed:
                survived.append(f"{name}, which {test} does not notice")
    for name, its_tests in runs.items() if others else ():
        if failing := others_that_fail(copy, its_tests, tests, name):
            print(f"{name} also fails: {' '.join(failing)}", flush=True)
    for line in survived:
        print(f"survived: {line}")
    for suite, outcomes in sorted(counts.items()):
        print(f"{suite}: {outcomes['caught']} caught, {outcomes['SURVIVED']} survived")
    broken = [test for test in tests if test not in limits]
    for test in broken:
        print(f"fails without a fault: {test}")
    print(f"mutate: {len(runs)} faults, {len(survived)} survived, {len(broken)} tests fail without one")
    return 1 if survived or broken else 0


def asked_of_the_fuzzer(faults):
    """{name: tests}: the faults in engines that it has to notice."""
    names = {fault.name for fault in faults if fault.file.startswith(engines.ENGINES)}
    return {name: [engines.FUZZER] for name in sorted(names)
            if not any(fnmatch.fnmatch(name, pattern) for pattern in engines.NOT_DRAWN)}


def noticed_by_the_fuzzer(copy, fault):
    """(the fault was noticed, how, seconds). What fails without the fault, too, has noticed nothing."""
    passed, output, seconds = run_test(copy, engines.FUZZER, fault, 60 * Fuzzer.minutes + 600)
    failed = re.search(r"^FAILED ([\w-]+): (.*)", output, re.M)
    if passed or not failed:
        return not passed, "" if passed else "ended", seconds
    case, how = failed.groups()
    stands = run_test(copy, f"equivalence {case}")[0]
    return stands, f"{case}: {how[:100]}" + ("" if stands else ", WITHOUT THE FAULT, TOO: repair that first"), seconds


def ask_fuzzer(copy, runs, at_once):
    reached = copy / "build/faults-reached"
    reached.unlink(missing_ok=True)
    passed, output, seconds = run_test(copy, engines.FUZZER, ACCELERATE_FAULTS_REACHED=str(reached))
    print(f"without a fault: {'clean' if passed else 'NOT CLEAN'} ({seconds:.0f} s)", flush=True)
    if not passed:
        print(output[-3000:])
    for name in sorted(set(runs) - set(reached.read_text().splitlines())):
        print(f"not reached by then: {name}")
    unnoticed = []
    with concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        found = zip(runs, pool.map(lambda name: noticed_by_the_fuzzer(copy, name), runs))
        for number, (name, (noticed, how, seconds)) in enumerate(found, 1):
            print(f"[{number}/{len(runs)}] {'noticed' if noticed else 'UNNOTICED'}: {name} ({seconds:.0f} s"
                  f"{', ' + how if how else ''})", flush=True)
            if not noticed:
                unnoticed.append(name)
    noticed = len(runs) - len(unnoticed)
    share = 100 * noticed / max(len(runs), 1)
    print(f"mutate: the fuzzer notices {noticed} of {len(runs)} faults in engines, {share:.0f} %")
    return 0 if noticed >= 0.8 * len(runs) else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults, or parts of their names; default: all")
    parser.add_argument("--check", action="store_true", help="only look whether the list fits the sources")
    parser.add_argument("--copy", type=pathlib.Path, default=ROOT / "build/mutants", help="where the copy is built")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers at a time")
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="tests at a time; some measure time")
    parser.add_argument("--others", action="store_true", help="say which tests of other faults fail, too")
    parser.add_argument("--build-only", action="store_true")
    parser.add_argument("--run-only", action="store_true", help="of the copy as it is")
    parser.add_argument("--fuzzer", action="store_true", help="ask the equivalence fuzzer about the faults in engines")
    parser.add_argument("--minutes", type=float, default=Fuzzer.minutes, help="that it has for each")
    parser.add_argument("--from", dest="first", default=Fuzzer.first, metavar="SEED", help="its first seed")
    options = parser.parse_args()
    Fuzzer.minutes, Fuzzer.first = options.minutes, options.first
    problems, proved, fields = check(listed.FAULTS)
    for problem in problems:
        print(problem)
    if options.check or problems:
        print(f"mutate: {len(runs_of(listed.FAULTS))} faults, which prove {proved} of {fields} option fields; "
              f"{len(problems)} problems")
        return 1 if problems else 0
    wanted = asked_of_the_fuzzer(listed.FAULTS) if options.fuzzer else runs_of(listed.FAULTS)
    runs = {name: its_tests for name, its_tests in wanted.items()
            if not options.names or any(part in name for part in options.names)}
    copy = options.copy.resolve()
    if not options.run_only:
        copy_tree(copy, listed.FAULTS)
        build(copy, {test.split()[0] for its_tests in runs.values() for test in its_tests}, options.jobs)
    if options.fuzzer and not options.build_only:
        return ask_fuzzer(copy, runs, options.at_once)
    return 0 if options.build_only else run(copy, runs, options.others, options.at_once)


if __name__ == "__main__":
    sys.exit(main())
