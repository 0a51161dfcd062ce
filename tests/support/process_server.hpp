#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

/// What rank_server.hpp and program_server.hpp share: processes that fork others, as they are told over a socket of
/// this machine. Whatever fails ends the process, and says so.
namespace support {

[[noreturn]] void die(const char* what);

void send_all(int socket, const void* data, size_t size);
/// False where the other end has closed the socket.
bool receive_all(int socket, void* data, size_t size);

/// One byte, with open files.
struct Order {
  char verb = 0;
  std::vector<int> descriptors = {};
};
void send_order(int socket, char verb, std::span<const int> descriptors = {});
/// The receiver closes the descriptors. Nothing where the other end has closed the socket.
std::optional<Order> receive_order(int socket);

/// Lists of text without '\0'.
void send_strings(int socket, const std::vector<std::vector<std::string>>& lists);
/// Empty where the other end has closed the socket.
std::vector<std::vector<std::string>> receive_strings(int socket);

/// A fork takes only the calling thread along. @return false: there are more, which it has said of `who`
bool has_one_thread(const char* who);

/// For exec and for environ, which keep them: for good, as long as `strings` stays where it is.
char** as_pointers(std::vector<std::string>& strings);

}  // namespace support
