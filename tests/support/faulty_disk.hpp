#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

/// What a disk does to those who write files below one folder: the program's calls of the system are ours. For programs
/// that are APART.
namespace support::faulty_disk {

enum class Fault {
  none,         ///< calls are counted
  dies,         ///< instead of the call
  writes_less,  ///< half of what was asked for, from that call on
  eio,          ///< a write fails
  enospc,
  no_flush,  ///< an fsync fails
};

/// From here on calls that change something below `root` are counted, and `fault` comes with the call number `at`: the
/// next write or fsync where the fault is one of those. All calls are noted in `journal`, which processes share.
/// @param death  of Fault::dies
void arm(const std::filesystem::path& root, const std::filesystem::path& journal, Fault fault, int64_t at,
         std::function<void()> death = {});
/// @return the calls that were counted
int64_t disarm();

/// A power cut, when all processes have ended: takes back what need not have reached the disk, by the throw of a coin
/// for each folder and each file. Names come and go with an fsync of their folder, bytes with one of their file.
/// @return the changes that are taken back
int64_t cut_power(const std::filesystem::path& journal, uint64_t seed);

}  // namespace support::faulty_disk
