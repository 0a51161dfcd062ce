#!/usr/bin/env python3
"""There is one way in for what others may have written: src/input/json and src/input/read_file (and, on it,
src/formats/input_file and mapped_file). This check finds readers that go another way.

Files that may open files by themselves are listed here, with the reason."""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

ALLOWED = {
    "the system's own files, of /proc and /sys": """
        src/memory/available.cpp src/comm/shared_memory.cpp src/comm/waits.cpp src/utils/device_types.cpp
        src/launch/job/host.cpp src/launch/system/affinity.cpp
        src/accelerator/memory_snapshot.cpp src/memory/file_mappings.cpp src/observe/thread_stacks.cpp src/profiler/trace_file.cpp src/launch/system/ports.cpp src/launch/system/process.cpp src/network/peer_user.cpp cli/commands/env.cpp""",
    "files that it has made itself": "src/launch/supervise/rank_streams.cpp",
    "what files_of() has found to be regular files, to be sent as they are": "programs/sagemaker/source.cpp",
}
WAYS = {
    r"\b(json|Json|Value|ordered_json)::(parse|accept|sax_parse|from_\w+)\(": "parse_json() of input/json.hpp",
    r"\b(std::)?ifstream\b|\bfopen\(": "read_text() or open_regular() of input/read_file.hpp",
}
ENTRIES = {"src/input/json.cpp", "src/input/read_file.cpp"}


def main() -> int:
    allowed = {name for names in ALLOWED.values() for name in names.split()}
    used, problems = set(), []
    for folder in ("src", "include", "programs", "cli"):
        for path in sorted((ROOT / folder).rglob("*.[ch]pp")):
            name = str(path.relative_to(ROOT))
            for number, line in enumerate(path.read_text().splitlines(), 1):
                code = line.split("//")[0]
                for way, instead in WAYS.items():
                    if name in ENTRIES or not re.search(way, code) or "#include" in code:
                        continue
                    if "ifstream" in way and name in allowed:
                        used.add(name)
                    else:
                        problems.append(f"{name}:{number}: '{code.strip()}' goes another way, expected {instead}")
    problems += [f"{name} is in the list of this check, but opens nothing" for name in sorted(allowed - used)]
    print("\n".join(problems) or f"check_inputs: {len(used)} files open what needs no check, 0 problems")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
