"""Faults in what is carried between runs of Accelerate in Python and here."""
from faults import F

on = "python_run_tests PythonRun.GoesOnHereAndBackThere"
file = "src/run_state/state_parts.cpp"
F("random states of Python are read", file, "read_object(file, «formats::PickledObjects::numpy_numbers»)",
  "formats::PickledObjects::refused", on)
F("Python's own generators are carried along", file, "run.python_generators = «checkpointing::python_generators(state)»;",
  "std::nullopt", on)
F("Python's own generators follow the seed", "src/checkpoint/python_generators.cpp",
  "const auto low = «static_cast<uint32_t>(seed)»,", "uint32_t{1}",
  "checkpoint_tests CheckpointTest.PythonReadsEveryFileAndGoesOn")
F("sharded files have the rates that a schedule began with", "src/run_state/state_parts.cpp",
  "if («&scheduler.optimizer() == &optimizer.optimizer()») return", "false", on)
