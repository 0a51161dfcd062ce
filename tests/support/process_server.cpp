#include "process_server.hpp"

#include <dirent.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace support {
namespace {

constexpr size_t kMostDescriptors = 3;

struct Message {
  explicit Message(char& byte) : bytes{&byte, 1} {
    header.msg_iov = &bytes;
    header.msg_iovlen = 1;
  }
  iovec bytes;
  alignas(cmsghdr) char control[CMSG_SPACE(kMostDescriptors * sizeof(int))] = {};
  msghdr header{};
};

}  // namespace

void die(const char* what) {
  std::perror(what);
  std::_Exit(125);
}

void send_all(int socket, const void* data, size_t size) {
  for (size_t sent = 0; sent < size;) {
    const ssize_t n = ::send(socket, static_cast<const char*>(data) + sent, size - sent, MSG_NOSIGNAL);
    if (n < 0 && errno != EINTR) die("socket of tests: send");
    if (n > 0) sent += static_cast<size_t>(n);
  }
}

bool receive_all(int socket, void* data, size_t size) {
  for (size_t got = 0; got < size;) {
    const ssize_t n = ::recv(socket, static_cast<char*>(data) + got, size - got, 0);
    if (n == 0) return false;
    if (n < 0 && errno != EINTR) die("socket of tests: recv");
    if (n > 0) got += static_cast<size_t>(n);
  }
  return true;
}

void send_order(int socket, char verb, std::span<const int> descriptors) {
  Message message(verb);
  if (!descriptors.empty()) {
    message.header.msg_control = message.control;
    message.header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message.header);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(descriptors.size_bytes());
    std::memcpy(CMSG_DATA(header), descriptors.data(), descriptors.size_bytes());
  }
  while (::sendmsg(socket, &message.header, MSG_NOSIGNAL) != 1)
    if (errno != EINTR) die("socket of tests: sendmsg");
}

std::optional<Order> receive_order(int socket) {
  Order order;
  Message message(order.verb);
  message.header.msg_control = message.control;
  message.header.msg_controllen = sizeof(message.control);
  ssize_t n = 0;
  while ((n = ::recvmsg(socket, &message.header, MSG_CMSG_CLOEXEC)) < 0)
    if (errno != EINTR) die("socket of tests: recvmsg");
  if (n == 0) return std::nullopt;
  if (const cmsghdr* header = CMSG_FIRSTHDR(&message.header)) {
    order.descriptors.resize((header->cmsg_len - CMSG_LEN(0)) / sizeof(int));
    std::memcpy(order.descriptors.data(), CMSG_DATA(header), order.descriptors.size() * sizeof(int));
  }
  return order;
}

// The length of what follows, and of each list how many it has and its strings; each ends with '\0'.
void send_strings(int socket, const std::vector<std::vector<std::string>>& lists) {
  std::string text;
  for (const auto& list : lists) {
    text += std::to_string(list.size()) + '\0';
    for (const auto& string : list) text += string + '\0';
  }
  const uint64_t size = text.size();
  send_all(socket, &size, sizeof(size));
  send_all(socket, text.data(), text.size());
}

std::vector<std::vector<std::string>> receive_strings(int socket) {
  uint64_t size = 0;
  if (!receive_all(socket, &size, sizeof(size))) return {};
  std::string text(size, '\0');
  if (!receive_all(socket, text.data(), text.size())) return {};
  size_t at = 0;
  const auto next = [&] {
    std::string string(text.c_str() + at);
    at += string.size() + 1;
    return string;
  };
  std::vector<std::vector<std::string>> lists;
  while (at < text.size()) {
    auto& list = lists.emplace_back(std::stoull(next()));
    for (auto& string : list) string = next();
  }
  return lists;
}

bool has_one_thread(const char* who) {
  int64_t count = 0;
  DIR* tasks = ::opendir("/proc/self/task");
  while (const dirent* entry = ::readdir(tasks)) count += entry->d_name[0] != '.';
  ::closedir(tasks);
  if (count != 1) std::fprintf(stderr, "%s: found %ld threads in front of main(), expected 1\n", who, long{count});
  return count == 1;
}

char** as_pointers(std::vector<std::string>& strings) {
  auto* pointers = new std::vector<char*>;
  for (auto& string : strings) pointers->push_back(string.data());
  pointers->push_back(nullptr);
  return pointers->data();
}

}  // namespace support
