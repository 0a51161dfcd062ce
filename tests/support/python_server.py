"""Runs scripts for test programs, each in a process of its own, without paying for their imports each time.

    python_server.py          for the one test program at the other end of standard input, a socket; ends with it
    python_server.py SOCKET   for all that connect to it (scripts/test.sh starts it so); ends, and SOCKET's folder goes, with the process that started it

Loading torch and transformers takes 2 to 6 seconds of processor time. Here what a script imports at its top is imported before it runs, once for all scripts; the
script itself runs in a fork, with its test program's folder and environment. This process computes nothing, so that a fork finds every thread pool still to be made.

A request: the number of its bytes on a line, then words that are joined by NUL: a file for stdout and stderr, the folder, the script, the number of its arguments,
these, and the environment. The answer: a line with the exit code (negative: the signal) once the script has ended. A program that leaves ends its script.
"""
import ast
import atexit
import contextlib
import ctypes
import importlib
import os
import selectors
import shutil
import signal
import socket
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


class Client:
    def __init__(self, connection):
        self.connection, self.stream, self.child, self.end_of_child = connection, connection.makefile("rb"), None, None

    def request(self):
        """@return the words, or None at the end"""
        size = self.stream.readline()
        return self.stream.read(int(size)).decode(errors="surrogateescape").split("\0") if size else None


def serve(selector):
    """@return the words of a request, in the fork that is to run it"""
    while True:
        for key, _ in selector.select():
            client = key.data
            if client is None:
                connection, _ = key.fileobj.accept()
                selector.register(connection, selectors.EVENT_READ, Client(connection))
            elif key.fileobj is client.connection:
                words = None
                with contextlib.suppress(OSError):
                    words = client.request()
                if words is None:
                    selector.unregister(client.connection)
                    client.connection.close()
                    if client.child is not None:
                        os.kill(client.child, signal.SIGKILL)
                    elif not selector.get_map():
                        os._exit(0)
                    continue
                with contextlib.suppress(Exception):
                    load_imports(words[2])
                client.child = os.fork()
                if client.child == 0:
                    for key in list(selector.get_map().values()):
                        os.close(key.fd if isinstance(key.fileobj, int) else key.fileobj.detach())
                    return words
                client.end_of_child = os.pidfd_open(client.child)
                selector.register(client.end_of_child, selectors.EVENT_READ, client)
            else:
                _, status = os.waitpid(client.child, 0)
                selector.unregister(client.end_of_child)
                os.close(client.end_of_child)
                client.child = None
                with contextlib.suppress(OSError):  # it has left
                    client.connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
                if not selector.get_map():
                    os._exit(0)


def become(words):
    """The script's process, which ends as one that was started with it would: by the end of the script, an exception or sys.exit; but it does not take libraries
    apart, which for LibTorch's operators costs as much as loading them."""
    output, folder, script, count, *rest = words
    arguments, environment = rest[:int(count)], rest[int(count):]
    output = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, targets in ((os.open(os.devnull, os.O_RDWR), [0]), (output, [1, 2])):
        for target in targets:
            os.dup2(source, target)
        os.close(source)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(entry.split("=", 1) for entry in environment if "=" in entry)
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


ends_with_parent = 1  # PR_SET_PDEATHSIG
with selectors.DefaultSelector() as all_of_them:
    if len(sys.argv) > 1:

        def end(*_):
            shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent's
        ctypes.CDLL(None).prctl(ends_with_parent, signal.SIGTERM)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(sys.argv[1])
        listener.listen(64)
        all_of_them.register(listener, selectors.EVENT_READ, None)
    else:
        only = socket.socket(fileno=os.dup(0))
        all_of_them.register(only, selectors.EVENT_READ, Client(only))
    request = serve(all_of_them)
if len(sys.argv) > 1:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
become(request)
