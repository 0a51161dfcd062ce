#!/usr/bin/env python3
"""Compiles the kernels of src/codes/cuda by NVIDIA's run-time compiler, as a program on a GPU would, without a GPU.

    scripts/nvrtc_check.py [--arch sm_90 ...] [--only TEXT] [--quick] [--verbose] [LIBRARY]

LIBRARY is libnvrtc.so.13 or .12; default: that of `scripts/cuda_build.sh --fetch-headers`, without which the exit
status is 77. Fails where a kernel does not compile, or its arrays lie in memory instead of registers.
"""
import argparse
import ctypes
import glob
import os
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / "src/codes/cuda"
ENCODINGS = "Int8Rowwise FourBit Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
FEW_BYTES = 32  # a number or two may wait in memory, where the compiler finds that better than more registers
NUMBERS = "Float Half BFloat16".split()


def kernels():
    for encoding in ENCODINGS:
        for number in NUMBERS:
            yield f"decode<{encoding},{number}>"
            if encoding in ("Int8Rowwise", "FourBit"):
                yield f"decode_any<{encoding},{number}>"
        for rows in range(1, 9):
            yield f"product<{encoding},{NUMBERS[rows % 3]},{rows}>"


def find_library():
    deps = os.environ.get("ACCELERATE_DEPS_DIR", ROOT / ".deps")
    found = sorted(glob.glob(f"{deps}/cuda_headers/nvidia/cu13/lib/libnvrtc.so.*"))
    if not found:
        print("nvrtc_check.py: NVIDIA's run-time compiler is not here; scripts/cuda_build.sh --fetch-headers gets it")
        sys.exit(77)
    return found[-1]


class Compiler:
    def __init__(self, library):
        for builtins in glob.glob(os.path.join(os.path.dirname(library), "libnvrtc-builtins.so*")):
            ctypes.CDLL(builtins, mode=ctypes.RTLD_GLOBAL)
        self.nvrtc = ctypes.CDLL(library)

    def text(self, program, size, get):
        length = ctypes.c_size_t()
        getattr(self.nvrtc, size)(program, ctypes.byref(length))
        buffer = ctypes.create_string_buffer(length.value)
        getattr(self.nvrtc, get)(program, buffer)
        return buffer.raw

    def __call__(self, kernel, arch):
        """(log, cubin); no cubin where it does not compile."""
        names = ["codes/cuda/arguments.cuh", "codes/cuda/kernels.cuh"]
        headers = (ctypes.c_char_p * 2)(*[(ROOT / "src" / name).read_bytes() for name in names])
        name_array = (ctypes.c_char_p * 2)(*[name.encode() for name in names])
        program = ctypes.c_void_p()
        self.nvrtc.nvrtcCreateProgram(ctypes.byref(program), b'#include "codes/cuda/kernels.cuh"\n', b"entry.cu", 2,
                                      headers, name_array)
        options = [f"--gpu-architecture={arch}", "--std=c++17", "--fmad=false", "--device-as-default-execution-space", f"-DKERNEL={kernel}",
                   "--ptxas-options=-v"]
        array = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = self.nvrtc.nvrtcCompileProgram(program, len(options), array)
        log = self.text(program, "nvrtcGetProgramLogSize", "nvrtcGetProgramLog").rstrip(b"\0").decode()
        cubin = self.text(program, "nvrtcGetCUBINSize", "nvrtcGetCUBIN") if status == 0 else None
        self.nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        return log, cubin


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", nargs="?")
    parser.add_argument("--arch", nargs="+", default=["sm_80", "sm_89", "sm_90"])
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    parser.add_argument("--quick", action="store_true", help="for one kind of GPU, and a few of an encoding's kernels")
    parser.add_argument("--verbose", action="store_true", help="a line for each kernel")
    asked = parser.parse_args()
    compiler = Compiler(asked.library or find_library())
    failed, most = [], {}
    quick = re.compile(r"decode_any|decode<\w+,Half>|product<\w+,\w+,[18]>")
    for arch in asked.arch[:1] if asked.quick else asked.arch:
        for kernel in [name for name in kernels() if asked.only in name and (quick.match(name) or not asked.quick)]:
            log, cubin = compiler(kernel, arch)
            used = re.search(r"Used (\d+) registers", log)
            memory = [int(n) for n in re.findall(r"(\d+) bytes (?:stack frame|spill)", log)] or [1 << 30]
            if asked.verbose and used:
                print(f"{arch} {kernel}: {used[1]} registers, {len(cubin)} bytes")
            if not cubin or not used or max(memory) > FEW_BYTES:
                failed.append(f"{arch} {kernel}:\n{log}")
                continue
            kind = kernel.partition("<")[0]
            most[kind] = max(most.get(kind, (0, "")), (int(used[1]), f"{kernel} for {arch}"))
    print("\n".join(failed))
    for kind, (registers, kernel) in most.items():
        print(f"{kind}: at most {registers} registers ({kernel})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
