#pragma once

/// The jobs of the failure tests: each engine at its usual work, until in one rank something happens.
namespace failing {

/// Runs this rank of the job that the environment names, as a program's main() would.
///   FAULT_JOB       an engine: ddp, fsdp, pipeline, dispatcher, checkpoint
///   FAULT_WAY       what happens, see Fault
///   FAULT_RANK      to whom
///   FAULT_FOLDER    where checkpoints go
///   FAULT_TIMEOUT   of the process group, in seconds
///   FAULT_AFTER_US  "killed at random": microseconds from the start of the process
/// The fault is preceded by a line "[fault at <steady clock's nanoseconds>]". @return the exit status
int run();

}  // namespace failing
