// Handshake of one TCP connection, without its input and output, and the greeting, which moves its
// bytes.
#include "transports/tcp/connect/handshake.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "transports/seal.h"
#include "transports/tcp/connect/peers.h"
#include "transports/transport.h"

namespace pycomm::tcp {

Handshake::Handshake(std::string secret, std::string group, const Hello& hello)
    : listening_(false),
      secret_(std::move(secret)),
      group_(std::move(group)),
      rank_(static_cast<int>(hello.target)),
      size_(static_cast<int>(hello.size)),
      sockets_(hello.sockets),
      tls_(hello.tls == 1),
      hello_(hello),
      in_size_(sizeof(Reply)) {
  fill_random({hello_.nonce, sizeof hello_.nonce});
  reply(hello_);
}

Handshake::Handshake(std::string secret, std::string group, int rank, int size, int sockets,
                     bool tls)
    : listening_(true),
      secret_(std::move(secret)),
      group_(std::move(group)),
      rank_(rank),
      size_(size),
      sockets_(sockets),
      tls_(tls),
      in_size_(sizeof(Hello)) {}

Span<uint8_t> Handshake::wanted() {
  if (state_ != State::running) return {};
  return {in_.data() + in_done_, in_size_ - in_done_};
}

void Handshake::received(size_t bytes) {
  in_done_ += bytes;
  if (in_done_ == in_size_) message_arrived();
}

Span<const uint8_t> Handshake::to_send() const {
  return {out_.data() + out_done_, out_size_ - out_done_};
}

template <typename T>
void Handshake::reply(const T& message) {
  std::memcpy(out_.data(), &message, sizeof message);
  out_done_ = 0;
  out_size_ = sizeof message;
}

template <typename T>
T Handshake::message() const {
  T result;
  std::memcpy(&result, in_.data(), sizeof result);
  return result;
}

void Handshake::message_arrived() {
  in_done_ = 0;
  switch (step_++) {
    case 0:
      return listening_ ? on_hello() : on_challenge();
    default:
      return listening_ ? on_proof() : on_welcome();
  }
}

void Handshake::on_hello() {
  hello_ = message<Hello>();
  if (std::memcmp(hello_.magic, Hello().magic, sizeof hello_.magic) != 0) {
    return refuse("it does not speak this protocol");
  }
  if (hello_.version != kWireVersion) {
    return refuse(Verdict::wrong_version, "it speaks version " + std::to_string(hello_.version) +
                                              ", we " + std::to_string(kWireVersion));
  }
  Reply challenge;
  fill_random({challenge.body.data(), challenge.body.size()});
  challenge_ = challenge.body;
  reply(challenge);
  in_size_ = sizeof(Digest);
}

void Handshake::on_proof() {
  if (!equal_proofs(message<Digest>(), proof_of("connect"))) {
    return refuse(Verdict::wrong_secret, "its secret is not ours");
  }
  const auto rank = static_cast<uint32_t>(rank_);
  const auto size = static_cast<uint32_t>(size_);
  const bool calls_back = hello_.lane == kCallBack;
  const bool known_use = hello_.lane == kControl || calls_back
                             ? hello_.socket == 0
                             : hello_.lane < kLanes && hello_.socket < hello_.sockets;
  const bool fits = sockets_ == 0 ? hello_.sockets >= 1 && hello_.sockets <= kMostSockets
                                  : hello_.sockets == sockets_;
  if (hello_.size != size || !fits || hello_.target != rank || hello_.rank == rank ||
      (hello_.rank < rank) != calls_back || hello_.rank >= size || !known_use) {
    return refuse(Verdict::wrong_shape,
                  "rank " + std::to_string(hello_.rank) + " of " + std::to_string(hello_.size) +
                      " wants " + std::to_string(hello_.sockets) + " sockets, we are " +
                      std::to_string(size_) + " ranks with " + std::to_string(sockets_));
  }
  if (hello_.tls != static_cast<uint16_t>(tls_)) {
    return refuse(Verdict::wrong_tls,
                  "rank " + std::to_string(hello_.rank) +
                      (tls_ ? " does not encrypt, we do" : " encrypts, we do not"));
  }
  Reply welcome;
  welcome.verdict = Verdict::welcome;
  welcome.body = proof_of("listen");
  reply(welcome);
  state_ = State::done;
}

void Handshake::on_challenge() {
  const auto challenge = message<Reply>();
  if (challenge.verdict == Verdict::wrong_version) {
    return refuse("it speaks version " + std::to_string(challenge.version) + ", we " +
                  std::to_string(kWireVersion) + "; install the same pycomm on all hosts");
  }
  if (challenge.verdict != Verdict::challenge) return refuse("it does not speak this protocol");
  challenge_ = challenge.body;
  reply(proof_of("connect"));
}

void Handshake::on_welcome() {
  const auto verdict = message<Reply>();
  switch (verdict.verdict) {
    case Verdict::welcome:
      if (equal_proofs(verdict.body, proof_of("listen"))) {
        state_ = State::done;
        return;
      }
      return refuse("it does not know our secret; set the same PYCOMM_SECRET on all ranks");
    case Verdict::wrong_secret:
      return refuse("it refused our secret; set the same PYCOMM_SECRET on all ranks");
    case Verdict::wrong_shape:
      return refuse(
          "it refused us: ranks or sockets differ; give all ranks the same world size "
          "and PYCOMM_SOCKETS");
    case Verdict::wrong_tls:
      return refuse("only one of us encrypts; set the same PYCOMM_TLS on all ranks");
    default:
      return refuse("it does not speak this protocol");
  }
}

Digest Handshake::proof_of(const char* role) const {
  std::string text = std::string("pycomm tcp ") + role + '\0';
  text += std::to_string(group_.size()) + ':' + group_;
  text.append(reinterpret_cast<const char*>(&hello_), sizeof hello_);
  text.append(reinterpret_cast<const char*>(challenge_.data()), challenge_.size());
  return hmac_sha256(secret_, text);
}

void Handshake::refuse(std::string problem) {
  state_ = State::refused;
  problem_ = std::move(problem);
}

void Handshake::refuse(Verdict verdict, std::string problem) {
  Reply refusal;
  refusal.verdict = verdict;
  reply(refusal);
  refuse(std::move(problem));
}

Greeting::Progress Greeting::advance(int fd, int& error) {
  while (!tls_) {
    while (handshake_.to_send().size > 0) {
      const auto out = handshake_.to_send();
      const ssize_t n = ::send(fd, out.data, out.size, MSG_NOSIGNAL);
      if (n < 0) {
        error = errno;
        return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
      }
      handshake_.sent(static_cast<size_t>(n));
    }
    if (handshake_.state() == Handshake::State::refused) return Progress::refused;
    if (handshake_.state() == Handshake::State::done) {
      // A call back carries nothing more.
      if (hello().tls == 0 || hello().lane == kCallBack) return Progress::done;
      tls_ = std::make_unique<TlsSession>(fd, !handshake_.listens(), handshake_.key(),
                                          hello().lane != kControl);
      break;
    }
    const auto in = handshake_.wanted();
    const ssize_t n = ::recv(fd, in.data, in.size, 0);
    if (n <= 0) {
      error = n < 0 ? errno : 0;
      return error == EAGAIN || error == EINTR ? Progress::waits : Progress::closed;
    }
    handshake_.received(static_cast<size_t>(n));
  }
  switch (tls_->shake_hands()) {
    case TlsSession::Progress::waits:
      return Progress::waits;
    case TlsSession::Progress::done:
      return Progress::done;
    default:  // a third party, or the network: another connection may succeed
      error = EPROTO;
      return Progress::closed;
  }
}

short Greeting::events() const {
  const bool sending = tls_ ? tls_->sending() : handshake_.to_send().size > 0;
  return sending ? POLLOUT : POLLIN;
}

std::string Greeting::problem() const { return tls_ ? tls_->problem() : handshake_.problem(); }

}  // namespace pycomm::tcp
