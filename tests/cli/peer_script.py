"""Runs one of Hugging Face Accelerate's own scripts, peer_script.py NAME, as `python -m` would, but leaves without Python's finalization.

PyTorch ends with "terminate called without an active exception" now and then when the interpreter goes while a thread of gloo still
holds a tensor that Python knows (pytorch#190489, #179291). That comes after the script's last line and says nothing about the launcher,
whose exit code the tests look at. A script that throws still ends with Python's code.
"""
import os
import runpy
import sys

from accelerate.test_utils import scripts

name = sys.argv[1]
sys.argv[:] = [os.path.join(list(scripts.__path__)[0], f"{name}.py")]
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
