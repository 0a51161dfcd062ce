#include "agent/tunnel.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <functional>
#include <sstream>
#include <vector>

#include "agent/address.hpp"
#include "utils/raise.hpp"

namespace accelerate::agent {
namespace {

using launcher::Fd;
using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kIdentity = "accelerate";
constexpr milliseconds kHandshake{10000};  // a stranger that says nothing holds a connection no longer

}  // namespace

struct FreeContext {
  void operator()(SSL_CTX* context) const { ::SSL_CTX_free(context); }
};
struct FreeSsl {
  void operator()(SSL* ssl) const { ::SSL_free(ssl); }
};
using Ssl = std::unique_ptr<SSL, FreeSsl>;

/// TLS 1.3 with a key instead of certificates, for as long as the process lives: OpenSSL's callbacks find the key in
/// it.
class Context {
 public:
  Context(bool server, const std::string& token)
      : context_(::SSL_CTX_new(server ? ::TLS_server_method() : ::TLS_client_method())) {
    unsigned length = 0;
    key_.resize(EVP_MAX_MD_SIZE);
    if (!context_ || ::EVP_Digest(token.data(), token.size(), key_.data(), &length, ::EVP_sha256(), nullptr) != 1)
      raise<InternalError>("OpenSSL can't be set up");
    key_.resize(length);
    SSL_CTX_set_min_proto_version(context_.get(), TLS1_3_VERSION);
    ::SSL_CTX_set_ciphersuites(context_.get(), "TLS_AES_128_GCM_SHA256");  // keys given as callbacks go with SHA-256
    ::SSL_CTX_set_num_tickets(context_.get(), 0);
    // The server has no certificate, so that a client without the key finds nothing to agree on. A client accepts none,
    // so that a server without the key fails too.
    ::SSL_CTX_set_verify(context_.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
    if (server) ::SSL_CTX_set_verify(context_.get(), SSL_VERIFY_NONE, nullptr);
    SSL_CTX_set_app_data(context_.get(), &key_);
    if (server)
      ::SSL_CTX_set_psk_server_callback(context_.get(),
                                        [](SSL* ssl, const char* identity, unsigned char* key, unsigned most) {
                                          return std::strcmp(identity, kIdentity) == 0 ? give(ssl, key, most) : 0;
                                        });
    else
      ::SSL_CTX_set_psk_client_callback(
          context_.get(), [](SSL* ssl, const char*, char* identity, unsigned room, unsigned char* key, unsigned most) {
            if (room < sizeof("accelerate")) return 0u;
            std::strcpy(identity, kIdentity);
            return give(ssl, key, most);
          });
  }
  SSL_CTX* get() const { return context_.get(); }

 private:
  static unsigned give(SSL* ssl, unsigned char* key, unsigned most) {
    const auto& secret = *static_cast<const std::vector<unsigned char>*>(SSL_CTX_get_app_data(::SSL_get_SSL_CTX(ssl)));
    if (secret.size() > most) return 0;
    std::memcpy(key, secret.data(), secret.size());
    return static_cast<unsigned>(secret.size());
  }
  std::vector<unsigned char> key_;
  std::unique_ptr<SSL_CTX, FreeContext> context_;
};

namespace {

void set_nonblocking(int fd) { ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK); }

/// Waits for what OpenSSL asked for. @return false when the deadline passes or it failed.
bool wait_for(SSL* ssl, int result, Clock::time_point deadline) {
  const int error = ::SSL_get_error(ssl, result);
  if (error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE) return false;
  pollfd ready{::SSL_get_fd(ssl), static_cast<short>(error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT), 0};
  const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
  return left > 0 && ::poll(&ready, 1, static_cast<int>(left)) > 0;
}

/// @return null when the other end does not know the token.
Ssl shake_hands(const Context& context, bool server, int fd) {
  set_nonblocking(fd);
  ::ERR_clear_error();
  Ssl ssl(::SSL_new(context.get()));
  ::SSL_set_fd(ssl.get(), fd);
  const auto deadline = Clock::now() + kHandshake;
  for (;;) {
    const int result = server ? ::SSL_accept(ssl.get()) : ::SSL_connect(ssl.get());
    if (result == 1) break;
    if (!wait_for(ssl.get(), result, deadline)) return nullptr;
  }
  if (!::SSL_session_reused(ssl.get())) return nullptr;  // agreed on something else than the key
  // A client learns from the first byte that the server has accepted it; until then the handshake is over for the
  // client only.
  char byte = '!';
  for (;;) {
    const int result = server ? ::SSL_write(ssl.get(), &byte, 1) : ::SSL_read(ssl.get(), &byte, 1);
    if (result == 1) return ssl;
    if (!wait_for(ssl.get(), result, deadline)) return nullptr;
  }
}

/// Carries bytes between the two until one of them ends.
void pump(SSL* ssl, int plain) {
  set_nonblocking(plain);
  std::string to_plain, to_ssl;
  char bytes[16 << 10];
  for (;;) {
    bool moved = false;
    if (to_plain.empty()) {
      const int got = ::SSL_read(ssl, bytes, sizeof(bytes));
      if (got > 0) to_plain.assign(bytes, static_cast<size_t>(got)), moved = true;
      else if (const int error = ::SSL_get_error(ssl, got);
               error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE)
        return;
    }
    if (!to_plain.empty()) {
      const ssize_t written = ::send(plain, to_plain.data(), to_plain.size(), MSG_NOSIGNAL);
      if (written > 0) to_plain.erase(0, static_cast<size_t>(written)), moved = true;
      else if (errno != EAGAIN && errno != EINTR) return;
    }
    if (to_ssl.empty()) {
      const ssize_t got = ::recv(plain, bytes, sizeof(bytes), 0);
      if (got > 0) to_ssl.assign(bytes, static_cast<size_t>(got)), moved = true;
      else if (got == 0 || (errno != EAGAIN && errno != EINTR)) return;
    }
    if (!to_ssl.empty()) {
      const int written = ::SSL_write(ssl, to_ssl.data(), static_cast<int>(to_ssl.size()));
      if (written > 0) to_ssl.erase(0, static_cast<size_t>(written)), moved = true;
      else if (const int error = ::SSL_get_error(ssl, written);
               error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE)
        return;
    }
    if (moved) continue;
    pollfd ready[2] = {{::SSL_get_fd(ssl), static_cast<short>(POLLIN | (to_ssl.empty() ? 0 : POLLOUT)), 0},
                       {plain, static_cast<short>(to_plain.empty() ? POLLIN : POLLOUT), 0}};
    ::poll(ready, 2, -1);
  }
}

/// Accepts connections for as long as the process lives, each on a thread of its own.
void serve(int listening, const std::function<void(Fd)>& connection) {
  for (;;) {
    Fd fd(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC));
    if (fd)
      std::thread([connection, moved = std::make_shared<Fd>(std::move(fd))] {
        connection(std::move(*moved));
      }).detach();
    else if (errno == EINVAL || errno == EBADF) return;  // shut down
    else std::this_thread::sleep_for(milliseconds(10));  // no descriptors left, or the peer has gone again
  }
}

}  // namespace

struct Gate::State {
  State(int fd, const std::string& token) : listening(fd), context(std::make_shared<Context>(true, token)) {}
  Fd listening;
  std::shared_ptr<Context> context;
  std::thread thread;
};

Gate::Gate(int listening, int64_t inner_port, const std::string& token)
    : state_(std::make_unique<State>(listening, token)) {
  state_->thread = std::thread([fd = listening, context = state_->context, inner_port] {
    serve(fd, [context, inner_port](Fd outside) {
      const Ssl ssl = shake_hands(*context, true, outside.get());
      if (!ssl) return;
      const Fd inside = connect_to("127.0.0.1", inner_port);
      if (inside) pump(ssl.get(), inside.get());
    });
  });
}

Gate::~Gate() {
  ::shutdown(state_->listening.get(), SHUT_RDWR);
  state_->thread.join();
}

struct Door::State {
  std::shared_ptr<Context> context;
  Fd listening;
  int64_t port = 0;
  std::thread thread;
};

Door::Door(const std::string& host, int64_t port, const std::string& token, milliseconds timeout)
    : state_(std::make_unique<State>()) {
  state_->context = std::make_shared<Context>(false, token);
  const Fd fd = wait_for_port(host, port, timeout);
  if (!shake_hands(*state_->context, false, fd.get()))
    raise<ConfigError>(
        "the host of the rendezvous at {}:{} refuses this machine: the token (--rdzv_conf token or token_file) is not "
        "the one that it was started with, or it was started without",
        host, port);
  state_->listening = Fd(listen_at("127.0.0.1", state_->port));
  if (!state_->listening) raise<LaunchError>("no port can be opened on 127.0.0.1");
  state_->thread = std::thread([fd = state_->listening.get(), context = state_->context, host, port] {
    serve(fd, [context, host, port](Fd inside) {
      if (!is_own_peer(inside.get())) return;
      const Fd outside = connect_to(host, port);
      if (!outside) return;
      if (const Ssl ssl = shake_hands(*context, false, outside.get())) pump(ssl.get(), inside.get());
    });
  });
}

Door::~Door() {
  if (!state_->thread.joinable()) return;
  ::shutdown(state_->listening.get(), SHUT_RDWR);
  state_->thread.join();
}

int64_t Door::port() const { return state_->port; }

bool is_own_peer(int socket) {
  sockaddr_in peer{};
  socklen_t length = sizeof(peer);
  if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) != 0 || peer.sin_family != AF_INET)
    return false;
  char wanted[32];
  std::snprintf(wanted, sizeof(wanted), "%08X:%04X", peer.sin_addr.s_addr, ntohs(peer.sin_port));
  for (const char* table :
       {"/proc/net/tcp", "/proc/net/tcp6"}) {  // a v6 socket may speak v4: its address ends like the v4 one
    std::ifstream in(table);
    std::string line;
    std::getline(in, line);
    while (std::getline(in, line)) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retries;
      int64_t uid = -1;
      words >> slot >> local >> remote >> state >> queues >> timer >> retries >> uid;
      if (local.ends_with(wanted) && state == "01") return uid == static_cast<int64_t>(::getuid());
    }
  }
  return false;
}

}  // namespace accelerate::agent
