#pragma once

/// Programs that tests start by a launcher, without the cost of loading LibTorch in each of them: most of what a small
/// one takes. The program is started once, as the *program server*, and stops in front of its main(), with LibTorch
/// loaded, one thread, and nothing done yet. What the launcher starts in its place is bin/from_program_server, which
/// has the server fork a process with its own arguments, environment, folder and open files, and ends as that one ends.
/// It takes that process along where it is killed.
namespace support {

/// In the environment of both: the path of the server's socket.
inline constexpr const char* kProgramServerVariable = "ACCELERATE_TEST_PROGRAM_SERVER";

/// The main() of a program: returns run(argc, argv), or serves where kProgramServerVariable is set. The socket is there
/// when it does, and it ends with the process that has started it.
int main_or_program_server(int argc, char** argv, int (*run)(int argc, char** argv));

}  // namespace support
