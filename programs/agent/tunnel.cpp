#include "agent/tunnel.hpp"

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "agent/address.hpp"
#include "network/peer_user.hpp"
#include "network/relay.hpp"
#include "utils/raise.hpp"

namespace accelerate::agent {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

constexpr const char* kIdentity = "accelerate";

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

/// The end of a connection that is encrypted, and between two who know the token.
class TlsStream : public Stream {
 public:
  TlsStream(std::shared_ptr<Context> context, bool server, Fd fd)
      : context_(std::move(context)), server_(server), fd_(std::move(fd)), ssl_(::SSL_new(context_->get())) {
    const int on = 1;
    ::fcntl(fd_.get(), F_SETFL, ::fcntl(fd_.get(), F_GETFL) | O_NONBLOCK);
    ::setsockopt(fd_.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
    if (!ssl_ || ::SSL_set_fd(ssl_.get(), fd_.get()) != 1) raise<InternalError>("OpenSSL can't be set up");
  }
  Now open() override {
    if (!agreed_) {
      ::ERR_clear_error();
      const int result = server_ ? ::SSL_accept(ssl_.get()) : ::SSL_connect(ssl_.get());
      if (result != 1) return may_come(result);
      if (!::SSL_session_reused(ssl_.get())) {  // agreed on something else than the key
        refused_ = true;
        return Now::over;
      }
      agreed_ = true;
    }
    // A client learns from the first byte that the server has accepted it; until then the handshake is over for the
    // client only.
    char byte = '!';
    ::ERR_clear_error();
    const int result = server_ ? ::SSL_write(ssl_.get(), &byte, 1) : ::SSL_read(ssl_.get(), &byte, 1);
    return result == 1 ? Now::moved : may_come(result);
  }
  Now read(std::string& into) override {
    char bytes[16 << 10];
    ::ERR_clear_error();
    const int got = ::SSL_read(ssl_.get(), bytes, sizeof(bytes));
    if (got <= 0) return may_come(got);
    into.append(bytes, static_cast<size_t>(got));
    return Now::moved;
  }
  Now write(std::string& from) override {
    ::ERR_clear_error();
    const int written = ::SSL_write(ssl_.get(), from.data(), static_cast<int>(from.size()));
    if (written <= 0) return may_come(written);
    from.erase(0, static_cast<size_t>(written));
    return Now::moved;
  }
  void finish() override { ::SSL_shutdown(ssl_.get()); }
  int fd() const override { return fd_.get(); }
  /// Whether the other end said that it does not agree, and did not only go away.
  bool was_refused() const { return refused_; }
  /// poll()'s event for which the last call waits.
  short wanted() const { return wanted_; }

 private:
  Now may_come(int result) {
    const int error = ::SSL_get_error(ssl_.get(), result);
    if (error == SSL_ERROR_WANT_READ || error == SSL_ERROR_WANT_WRITE) {
      wanted_ = error == SSL_ERROR_WANT_READ ? POLLIN : POLLOUT;
      return Now::waits;
    }
    // An end of the connection without words counts as a protocol error from OpenSSL 3 on.
    refused_ = error == SSL_ERROR_SSL && ERR_GET_REASON(::ERR_peek_error()) != SSL_R_UNEXPECTED_EOF_WHILE_READING;
    return Now::over;
  }

  const std::shared_ptr<Context> context_;
  const bool server_;
  const Fd fd_;
  const Ssl ssl_;
  bool agreed_ = false, refused_ = false;
  short wanted_ = 0;
};

enum class GateAnswer { accepted, refused, none };

/// Whether the gate accepts the token. Blocks.
GateAnswer try_gate(const std::shared_ptr<Context>& context, Fd fd, Clock::time_point deadline) {
  TlsStream stream(context, false, std::move(fd));
  for (;;) {
    const auto now = stream.open();
    if (now == Stream::Now::moved) return GateAnswer::accepted;
    if (now == Stream::Now::over) return stream.was_refused() ? GateAnswer::refused : GateAnswer::none;
    pollfd ready{stream.fd(), stream.wanted(), 0};
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now()).count();
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) <= 0) return GateAnswer::none;
  }
}

/// A connection that is being made, or none.
Fd begin_to_connect(const sockaddr_storage& to) {
  Fd fd(::socket(to.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const auto length = static_cast<socklen_t>(to.ss_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in));
  if (fd && ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&to), length) != 0 && errno != EINPROGRESS) return {};
  return fd;
}

}  // namespace

struct Gate::State {
  explicit State(GuardedPort port) : store(std::move(port)) {}
  GuardedPort store;
  std::optional<Relay> relay;
};

Gate::Gate(int listening, const std::string& token) {
  std::string why;
  auto store = GuardedPort::open(0, why);
  if (!store) raise<LaunchError>("no port can be opened on 127.0.0.1: {}", why);
  state_ = std::make_unique<State>(std::move(*store));
  Relay::Ends ends{.admit = admit_own_or_remote,
                   .near = [](Fd fd) { return plain_stream(std::move(fd)); },
                   .far = [&inner = state_->store]() -> std::unique_ptr<Stream> {
                     Fd fd = inner.connect();
                     return fd ? plain_stream(std::move(fd)) : nullptr;
                   },
                   .exhausted = nullptr};
  if (!token.empty()) {
    ends.admit = nullptr;  // anybody with the token may come
    ends.near = [context = std::make_shared<Context>(true, token)](Fd fd) {
      return std::make_unique<TlsStream>(context, true, std::move(fd));
    };
  }
  state_->relay.emplace(listening, std::move(ends));
}
Gate::~Gate() = default;
GuardedPort& Gate::store() { return state_->store; }

struct Door::State {
  int64_t port = 0;
  std::optional<Relay> relay;
};

Door::Door(const std::string& host, int64_t port, const std::string& token, milliseconds timeout)
    : state_(std::make_unique<State>()) {
  const auto context = std::make_shared<Context>(false, token);
  const auto end = Clock::now() + timeout;
  sockaddr_storage gate{};
  int tries = 20;
  for (auto answer = GateAnswer::none; answer != GateAnswer::accepted;) {
    Fd fd = wait_for_port(host, port, std::chrono::ceil<milliseconds>(end - Clock::now()));
    socklen_t length = sizeof(gate);
    const bool connected = ::getpeername(fd.get(), reinterpret_cast<sockaddr*>(&gate), &length) == 0;
    if (connected) answer = try_gate(context, std::move(fd), end);
    // A gate that many knock at may drop one of them.
    if (answer == GateAnswer::refused || (answer == GateAnswer::none && (--tries == 0 || Clock::now() > end)))
      raise<ConfigError>(
          "the host of the rendezvous at {}:{} refuses this machine: the token (--rdzv_conf token or token_file) is "
          "not the one that it was started with, or it was started without",
          host, port);
    if (answer == GateAnswer::none) std::this_thread::sleep_for(milliseconds(50));
  }
  const int listening = listen_at("127.0.0.1", state_->port);
  if (listening < 0) raise<LaunchError>("no port can be opened on 127.0.0.1: {}", std::strerror(-listening));
  state_->relay.emplace(listening, Relay::Ends{.admit = admit_own,
                                               .near = [](Fd fd) { return plain_stream(std::move(fd)); },
                                               .far = [context, gate]() -> std::unique_ptr<Stream> {
                                                 Fd fd = begin_to_connect(gate);
                                                 if (!fd) return nullptr;
                                                 return std::make_unique<TlsStream>(context, false, std::move(fd));
                                               },
                                               .exhausted = nullptr});
}
Door::~Door() = default;
int64_t Door::port() const { return state_->port; }

}  // namespace accelerate::agent
