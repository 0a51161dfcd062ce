"""Runs scripts for a test program, each in a process of its own, without paying for their imports each time.

Loading torch and transformers takes 2 to 6 seconds of processor time. Here what a script imports at its top is imported before it runs, once for all scripts of the
test program; the script itself runs in a fork. This process computes nothing, so that a fork finds every thread pool still to be made.

Standard input: a request after the other, the number of its lines and then each on a line: a file for stdout and stderr, the script, its arguments.
Standard output: a line with the exit code (negative: the signal) once the script has ended. Ends with its input.
"""
import ast
import atexit
import contextlib
import importlib
import os
import sys
import threading
import traceback
import types


def load_imports(script):
    """The script itself will find out what fails here, or exists only later."""
    with open(script) as file:
        statements = ast.parse(file.read()).body
    for statement in statements:
        if isinstance(statement, ast.Import):
            for alias in statement.names:
                with contextlib.suppress(ImportError):
                    importlib.import_module(alias.name)
        elif isinstance(statement, ast.ImportFrom) and not statement.level:
            with contextlib.suppress(ImportError):
                module = importlib.import_module(statement.module)
                for alias in statement.names:
                    getattr(module, alias.name, None)  # transformers imports a model's module when it is asked for


def read_request(stream):
    count = stream.readline()
    return [stream.readline().removesuffix("\n") for _ in range(int(count))] if count else None


requests = os.fdopen(os.dup(0), "r")
answers = os.dup(1)
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
while True:
    request = read_request(requests)
    if request is None:
        os._exit(0)
    output, script, *arguments = request
    load_imports(script)
    child = os.fork()
    if child == 0:
        break
    _, status = os.waitpid(child, 0)
    os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())

# The script's process, which ends as one that was started with it would: by the end of the script, an exception or sys.exit; but it does not take libraries
# apart, which for LibTorch's operators costs as much as loading them.
os.close(answers)
os.close(requests.fileno())
output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
os.dup2(output, 1)
os.dup2(output, 2)
os.close(output)
sys.argv = [script, *arguments]
sys.path.insert(0, os.path.dirname(script))  # before this file's
main = types.ModuleType("__main__")
main.__file__ = script
sys.modules["__main__"] = main
code = 0
try:
    with open(script) as file:
        exec(compile(file.read(), script, "exec"), main.__dict__)
except SystemExit as end:
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    if code == 1 and end.code != 1:
        print(end.code, file=sys.stderr)
except BaseException:
    traceback.print_exc()
    code = 1
threading._shutdown()  # waits for threads, as the interpreter does
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(code)
