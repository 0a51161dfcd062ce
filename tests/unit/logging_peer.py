"""Lines of the reference's loggers, for logging_test.cpp: logging_peer.py LEVEL,ENVIRONMENT,OWN,OTHER ...

For each of its arguments a logger "a.b" is asked for with LEVEL ("-": none), with ACCELERATE_LOG_LEVEL as in
ENVIRONMENT; then "a" gets the level OWN. Prints the argument, and a line for each record of "a.b" and of "other" (asked
for with OTHER), at each level and once.
"""
import logging
import os
import sys

from accelerate import PartialState
from accelerate.logging import get_logger


class Lines(logging.Handler):
    def emit(self, record):
        print(record.levelname, record.name, record.getMessage().removeprefix("[RANK 0] "), flush=True)


root = logging.getLogger()
before = root.level, root.handlers[:]  # the interpreter serves other scripts, too
root.handlers[:] = [Lines()]
PartialState(cpu=True)
for case in sys.argv[1:]:
    print(case, flush=True)
    level, environment, own, other = (None if word == "-" else word for word in case.split(","))
    os.environ.pop("ACCELERATE_LOG_LEVEL", None)
    if environment:
        os.environ["ACCELERATE_LOG_LEVEL"] = environment
    root.setLevel(logging.WARNING)
    for name in ("a", "a.b", "other"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    loggers = [get_logger("other", other), get_logger("a.b", level)]
    if own:
        logging.getLogger("a").setLevel(own)
    for logger in loggers:
        for name in ("debug", "info", "warning", "error", "critical"):
            getattr(logger, name)(name[0])
        for _ in range(2):
            logger.warning_once(case)
os.environ.pop("ACCELERATE_LOG_LEVEL", None)
root.setLevel(before[0])
root.handlers[:] = before[1]
