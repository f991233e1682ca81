// Handshake: two ranks prove to each other that they know the group's secret, before anything else
// is read.
//
//   connecting rank             listening rank
//   Hello (ids, nonce)   ->
//                        <-     Reply challenge (nonce)
//   Proof (HMAC)         ->
//                        <-     Reply welcome (HMAC) or refused (why)
//
// `secret` is the key of one that was given to all ranks (transports/seal.h), or the random one of
// the listening rank. Both HMAC-SHA256 cover the role, the group, both ranks, the purpose of the
// connection and both nonces, so none can be replayed or reflected. The listening rank proves
// nothing to strangers. `group` is its name and, with a given secret, its session
// (transports/rendezvous.h). All messages have a fixed size. A Handshake does no input or output:
// its caller feeds it received bytes and sends what to_send() returns.
#pragma once
#include <array>
#include <memory>
#include <string>

#include "core/sha256.h"
#include "core/types.h"
#include "transports/tcp/tls/session.h"

namespace pycomm::tcp {

constexpr uint32_t kWireVersion = 9;
/// Lane number of a control connection, which carries aborts and closes instead of a lane.
constexpr uint16_t kControl = 0xffff;
/// Lane number of a connection by which a lower rank asks a higher one to make the control
/// connection again. It ends with the handshake.
constexpr uint16_t kCallBack = 0xfffe;

/// A connection that was cut and is to be made again, or the first ones of a lane.
struct WantedConnection {
  int rank;
  int lane;                 ///< or kControl
  int socket = -1;          ///< of the lane; negative: all, for the first time
  uint32_t generation = 0;  ///< of the one that was cut
};

/// The purpose of a connection. Sent as it is in memory.
struct Hello {
  char magic[8] = {'p', 'y', 'c', 'o', 'm', 'm', '\r', '\n'};
  uint32_t version = kWireVersion;
  uint32_t size = 0;    ///< of the group
  uint32_t rank = 0;    ///< that connects
  uint32_t target = 0;  ///< that it connects to
  uint16_t lane = 0;    ///< or kControl
  uint16_t socket = 0;
  uint16_t sockets = 0;     ///< of the lane; the rank that connects decides, unless the user has
  uint16_t tls = 0;         ///< 1: everything after the handshake is encrypted
  uint32_t generation = 0;  ///< 0 for the first connection of this socket, then counting
  uint32_t unused = 0;
  uint8_t nonce[32] = {};
};
static_assert(sizeof(Hello) == 72, "Hello travels without padding");

class Handshake {
 public:
  enum class State : uint8_t {
    running,
    done,     ///< both sides are authenticated; frames follow
    refused,  ///< over; problem() says why
  };

  /// Begins the side that connects. `hello` comes without nonce.
  Handshake(std::string secret, std::string group, const Hello& hello);
  /// Begins the side that listens; it accepts ranks above its own, and for kCallBack those below.
  /// `sockets` is their number in each lane, or 0 if the other side decides.
  Handshake(std::string secret, std::string group, int rank, int size, int sockets, bool tls);

  State state() const { return state_; }
  bool listens() const { return listening_; }
  const std::string& problem() const { return problem_; }
  /// Returns the purpose of the connection; on the listening side proven only when done.
  const Hello& hello() const { return hello_; }
  /// Returns a key for this connection alone; both sides have it when done.
  Digest key() const { return proof_of("tls"); }

  /// Returns the buffer for the next bytes from the other side; exactly these are wanted, never
  /// more.
  Span<uint8_t> wanted();
  void received(size_t bytes);
  /// Returns the bytes to send now; some may be left to send even after the state is final.
  Span<const uint8_t> to_send() const;
  void sent(size_t bytes) { out_done_ += bytes; }

 private:
  enum class Verdict : uint32_t {
    challenge = 1,
    welcome,
    wrong_secret,
    wrong_version,
    wrong_shape,
    wrong_tls
  };
  struct Reply {
    Verdict verdict = Verdict::challenge;
    uint32_t version = kWireVersion;
    Digest body = {};  // nonce or HMAC
  };
  static_assert(sizeof(Reply) == 40, "Reply travels without padding");

  void message_arrived();
  void on_hello();
  void on_proof();
  void on_challenge();
  void on_welcome();
  Digest proof_of(const char* role) const;
  void refuse(std::string problem);
  void refuse(Verdict verdict, std::string problem);
  template <typename T>
  void reply(const T& message);
  template <typename T>
  T message() const;

  bool listening_;
  std::string secret_, group_;
  int rank_, size_, sockets_;  // of the listening side
  bool tls_;
  State state_ = State::running;
  std::string problem_;
  Hello hello_;
  Digest challenge_ = {};  // the listening side's nonce
  std::array<uint8_t, sizeof(Hello)> in_ = {}, out_ = {};
  size_t in_done_ = 0, in_size_ = 0, out_done_ = 0, out_size_ = 0;
  int step_ = 0;  // messages that have arrived
};

/// The first messages on a connection, which are the handshake and then, if the group encrypts,
/// that of TLS. After the handshake such a connection neither sends nor accepts a plain byte.
class Greeting {
 public:
  enum class Progress : uint8_t {
    waits,
    closed,   ///< by the other side or by the network
    refused,  ///< by one of the two; problem() says why
    done,
  };

  explicit Greeting(Handshake handshake) : handshake_(std::move(handshake)) {}

  /// Advances as far as it can now. `error` gets the reason of `closed`, 0 for an orderly end.
  Progress advance(int fd, int& error);
  /// Returns the events to poll() for in state `waits`.
  short events() const;
  const Hello& hello() const { return handshake_.hello(); }
  std::string problem() const;
  /// Returns the connection, once done.
  SecureSocket sock(Fd fd) { return SecureSocket(std::move(fd), std::move(tls_)); }

 private:
  Handshake handshake_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace pycomm::tcp
