#include "trackers/http.hpp"
#include "utils/raise.hpp"

namespace accelerate::http {

bool is_available() { return false; }

Client::Client(Server) {
  raise<NotBuiltError>(
      "a tracker's server is reached through libcurl, whose headers were missing when this library was built: install "
      "libcurl4-openssl-dev and configure it again");
}

Client::~Client() = default;

Answer Client::send(const Request&) { throw NoAnswer("there is no libcurl"); }

}  // namespace accelerate::http
