#include <cstdlib>
#include <string>
#include <string_view>

#include "launch/monitor/web_page.hpp"

// Any bytes are answered, with one head and one body of the length that the head says. The job's state is told only
// to those that ask for it with GET or HEAD, by HTTP/1 and with one Host, without bytes that no name has.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace accelerate::launcher;
  const std::string_view request(reinterpret_cast<const char*>(data), size);
  const std::string kState = "{\"ranks\":[]}";
  bool told = false;
  const auto tell = [&] { return told = true, kState; };
  const auto answer = respond(request, "node-1", {.state = tell, .history = tell});
  const size_t end = answer.find("\r\n\r\n");
  if (!answer.starts_with("HTTP/1.1 ") || end == answer.npos) std::abort();
  const auto body = answer.substr(end + 4);
  const bool head = request.starts_with("HEAD ") && answer.starts_with("HTTP/1.1 200");
  const std::string length = "Content-Length: ";
  const auto said = std::stoul(answer.substr(answer.find(length) + length.size()));
  if (head ? !body.empty() : said != body.size()) std::abort();
  // Nothing of the request comes back.
  if (answer.substr(0, end).find('\0') != answer.npos) std::abort();
  if (told != (answer.find("application/json") != answer.npos) || (told && !head && body != kState)) std::abort();
  if (told && !request.starts_with("GET ") && !head) std::abort();
  return 0;
}
