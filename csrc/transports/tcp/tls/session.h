// TLS 1.3 on one connection: all bytes are encrypted on their way, and a change of any byte is an
// error at the receiver.
//
// There are no certificates. Both ends hold a key that comes from the group's secret and from the
// handshake that they have just made (connect/handshake.h): an external pre-shared key, used with
// an ephemeral key exchange (psk_dhe_ke, RFC 8446, section 2.2), so that an attacker who learns the
// secret later cannot read recorded traffic. The cipher is AES-128-GCM.
#pragma once
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/sha256.h"
#include "core/types.h"
#include "transports/fd.h"

namespace pycomm::openssl {
struct SSL;
}

namespace pycomm::tcp {

/// The session of one connection. One thread at a time uses it. The socket does not block.
class TlsSession {
 public:
  enum class Progress : uint8_t { waits, failed, done };
  // The most bytes that are read ahead of decryption.
  static constexpr size_t kAhead = 160 << 10;

  /// `fd` outlives the session. `bulk`: much will travel; otherwise it gets small buffers, since a
  /// rank has one control connection to each other rank. Throws Error if there is no OpenSSL
  /// library.
  TlsSession(int fd, bool connects, const Digest& key, bool bulk);
  ~TlsSession();
  TlsSession(const TlsSession&) = delete;
  TlsSession& operator=(const TlsSession&) = delete;

  /// Advances the handshake as far as it can now. Nothing else may be sent before it is done.
  Progress shake_hands();
  /// True if a waiting handshake waits for room to send, not for bytes.
  bool sending() const { return sent_ < out_.size(); }
  /// Returns why it has failed.
  const std::string& problem() const { return problem_; }

  /// Behave as sendmsg and recvmsg: return bytes, 0 at the end, or -1 and errno, where EBADMSG is a
  /// record that was changed on its way. Bytes that are not counted as sent must be given again,
  /// before further ones.
  ssize_t send(const iovec* parts, size_t count);
  ssize_t receive(const iovec* parts, size_t count);

  // Network callbacks of OpenSSL.
  int take_in(char* out, int room);
  int put_out(const char* data, int bytes);
  bool ended() const { return ended_; }
  const Digest& key() const { return key_; }

 private:
  struct Record {
    size_t plain;  // plain bytes
    size_t end;    // in out_
  };

  bool flush();
  bool encrypt(const iovec* parts, size_t count, size_t skip);
  bool encrypt(const uint8_t* data, size_t bytes);
  void fail();

  const int fd_;
  const Digest key_;
  const size_t batch_;  // encrypted before the kernel gets it
  openssl::SSL* ssl_;
  bool established_ = false;
  bool ended_ = false;  // the other end has sent its last byte
  int error_ = 0;       // of the connection; permanent
  std::string problem_;
  std::vector<uint8_t> in_;
  size_t in_begin_ = 0, in_end_ = 0;
  std::vector<uint8_t> out_;  // encrypted; the kernel has the first sent_ bytes
  size_t sent_ = 0;
  std::deque<Record> records_;  // in out_, not yet counted as sent
  uint64_t encrypted_ = 0;      // records since the key was last changed
  std::vector<uint8_t> scratch_;
};

/// A connected socket, and its encryption if the group has one.
class SecureSocket {
 public:
  SecureSocket() = default;
  SecureSocket(Fd fd, std::unique_ptr<TlsSession> tls) : fd_(std::move(fd)), tls_(std::move(tls)) {}

  int get() const { return fd_.get(); }
  explicit operator bool() const { return static_cast<bool>(fd_); }
  bool encrypted() const { return tls_ != nullptr; }
  void reset() {
    tls_.reset();
    fd_.reset();
  }

  /// Behave as sendmsg and recvmsg, without waiting. An encrypted socket must be given the bytes
  /// again that it did not count as sent, before further ones.
  ssize_t send(iovec* parts, size_t count) {
    if (tls_) return tls_->send(parts, count);
    const msghdr call = {nullptr, 0, parts, count, nullptr, 0, 0};
    return ::sendmsg(fd_.get(), &call, MSG_DONTWAIT | MSG_NOSIGNAL);
  }
  ssize_t send(const void* data, size_t bytes) {
    iovec part = {const_cast<void*>(data), bytes};
    return send(&part, 1);
  }
  ssize_t receive(iovec* parts, size_t count) {
    if (tls_) return tls_->receive(parts, count);
    msghdr call = {nullptr, 0, parts, count, nullptr, 0, 0};
    return ::recvmsg(fd_.get(), &call, MSG_DONTWAIT);
  }
  ssize_t receive(void* to, size_t bytes) {
    iovec part = {to, bytes};
    return receive(&part, 1);
  }

 private:
  Fd fd_;
  std::unique_ptr<TlsSession> tls_;
};

}  // namespace pycomm::tcp
